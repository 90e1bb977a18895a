"""Which adapter runs a harness, and what is refused before a run."""

from __future__ import annotations

import pytest

from sandbox.harnesses.claude_code import ClaudeCode
from sandbox.harnesses.hands import HANDS
from sandbox.harnesses.pins import PINS
from sandbox.harnesses.registry import HARNESSES, adapter
from sandbox.runner.service import NotReady, agents_of
from server.schemas.runspec import Harness
from tests.sandbox.support import spec


def harness(**fields: str) -> Harness:
    return Harness.model_validate({"name": "claude-code", "version": "2.1.332"} | fields)


def test_an_adapter_is_found_by_name_or_by_import_path() -> None:
    assert adapter(harness()) is HARNESSES["claude-code"] is ClaudeCode
    assert adapter(harness(name="mine", adapter="sandbox.harnesses.claude_code:ClaudeCode")) is ClaudeCode


def test_every_pinned_harness_has_an_adapter_and_hands() -> None:
    assert set(HANDS) == set(HARNESSES) == set(PINS)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (harness(name="nothing"), "no adapter for nothing; known are mini-swe-agent, claude-code"),
        (harness(adapter="sandbox.nowhere:Agent"), "cannot be imported: No module named 'sandbox.nowhere'"),
        (harness(adapter="sandbox.harnesses.store:Store"), "no subclass"),
    ],
)
def test_what_is_no_adapter_is_refused_in_words(wanted: Harness, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        adapter(wanted)


def test_a_memory_limit_below_what_the_harness_itself_needs_is_refused() -> None:
    wanted = spec(harnesses=[{"name": "opencode", "version": "1.18.33"}])
    with pytest.raises(NotReady, match=r"limits.memory_mb: opencode itself needs \d+, 128 are given"):
        agents_of(wanted)
