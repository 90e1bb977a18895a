"""Which adapter runs a harness, and what is refused before a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.harnesses.base import Launcher
from sandbox.harnesses.claude_code import ClaudeCode
from sandbox.harnesses.hands import HANDS
from sandbox.harnesses.pins import PINS
from sandbox.harnesses.reference import Oracle
from sandbox.harnesses.registry import HARNESSES, adapter
from sandbox.harnesses.store import Store
from sandbox.runner.service import NotReady, agents_of, open_room
from sandbox.tasks.onebug import generate
from server.schemas.runspec import Harness, RunSpec
from tests.sandbox.support import needs_sandbox, spec


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
        (harness(adapter="sandbox.nowhere:Agent"), "cannot be imported: ModuleNotFoundError: No module named 'sandbox.nowhere'"),
        (harness(adapter="sandbox.harnesses.store:Store"), "no subclass"),
        (harness(adapter="sandbox.harnesses.store:Nothing"), "cannot be imported: AttributeError: .* no attribute 'Nothing'"),
        (harness(adapter="raises:Agent"), "raises:Agent of claude-code cannot be imported: RuntimeError: not here"),
        (harness(adapter="unwritten:Agent"), "unwritten:Agent of claude-code cannot be imported: SyntaxError"),
        (harness(adapter="leaves:Agent"), "leaves:Agent of claude-code cannot be imported: SystemExit: 5"),
    ],
)
def test_what_is_no_adapter_is_refused_in_words(wanted: Harness, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {"raises": "raise RuntimeError('not here')", "unwritten": "def x(:", "leaves": "import sys; sys.exit(5)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match=words):
        adapter(wanted)


@pytest.mark.parametrize(
    ("name", "start", "needs"),
    [("opencode", "exec", 1024), ("mini-swe-agent", "exec", 256), ("mini-swe-agent", "warm_fork", None), ("claude-code", "exec", 192)],
)
def test_a_memory_limit_below_what_the_harness_itself_needs_is_refused(name: str, start: str, needs: int | None) -> None:
    wanted = spec(harnesses=[{"name": name, "version": PINS[name].version, "start": start}])
    if needs is None:  # a fork shares its parent's
        assert agents_of(wanted) == {name: HARNESSES[name]}
        return
    with pytest.raises(NotReady, match=f"limits.memory_mb: {name} itself needs {needs}, 128 are given"):
        agents_of(wanted)


def test_a_cap_on_turns_without_a_tool_is_refused_for_a_harness_that_calls_none() -> None:
    wanted = {"harnesses": [{"name": "terminus-2", "version": PINS["terminus-2"].version}]}
    assert agents_of(spec(**wanted)) == {"terminus-2": HARNESSES["terminus-2"]}
    with pytest.raises(NotReady, match="no_tool_call_cap: terminus-2 calls no tools"):
        agents_of(spec(rollout={"no_tool_call_cap": 5}, **wanted))


class Unready(Oracle):
    @classmethod
    async def prepare(cls, harness: Harness, store: Store) -> Launcher:
        raise KeyError("a fault of the adapter")


ONE_BUG = {"family": "onebug", "train_tasks": 1, "held_out_tasks": 1}
ORACLE = "sandbox.harnesses.reference:Oracle"


@needs_sandbox
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapter": ORACLE, "start": "warm_fork"}, "mine cannot be started by warm_fork, only by exec"),
        ({"adapter": ORACLE, "prompt": "bare"}, "mine has no prompt bare, only full"),
        ({"adapter": f"{__name__}:Unready"}, "mine cannot be made ready, its adapter raised KeyError: 'a fault of the adapter'"),
        ({"adapter": "sandbox.harnesses.codex:Codex", "version": PINS["codex"].version}, r"run `rl harness install sandbox\S+codex:Codex`"),
    ],
)
def test_what_an_adapter_cannot_do_is_refused_before_the_run(fields: dict[str, str], words: str, tmp_path: Path) -> None:
    limits = {"memory_mb": 512, "processes": 32, "cpu_s": 20, "disk_mb": 16}
    refused(spec(harnesses=[{"name": "mine", "version": "1"} | fields], data=ONE_BUG, sandbox={"limits": limits}), words, tmp_path)


@needs_sandbox
def test_a_task_whose_own_memory_limit_is_too_small_for_a_harness_that_may_get_it_is_refused(tmp_path: Path) -> None:
    (made,) = generate(1, 1, held_out=False)
    made.write(path := tmp_path / "source" / made.name)
    text = (path / "task.toml").read_text()
    (path / "task.toml").write_text(text.replace("[environment]\n", "[environment]\nmemory_mb = 30\n"))
    oracle = [{"name": "mine", "version": "1", "adapter": ORACLE}]
    words = f"task {made.name}: memory_mb under .environment. of its task.toml is 30, mine needs 32"
    refused(spec(harnesses=oracle, data={"train": str(path.parent)}), words, tmp_path)


def refused(wanted: RunSpec, words: str, place: Path) -> None:
    async def opened() -> None:
        async with open_room(wanted, Store(place / "store"), place / "tasks", place / "trials", place / "sandboxes"):
            pass

    with pytest.raises(NotReady, match=words):
        asyncio.run(opened())
