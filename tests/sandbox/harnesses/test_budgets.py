"""What a rollout may use is said to each harness in words that it takes as its own end: it stops, and what it did is graded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sandbox.harnesses.hands import HANDS
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.verify import TITLE, repair_voice, task
from server.schemas.outcome import Cause, Failed, Scored, Termination
from server.schemas.scripted import ScriptedLimits, Voice
from tests.sandbox.harnesses.support import pinned, store
from tests.sandbox.support import needs_sandbox
from trainer.rollout.admission import admit

pytestmark = [needs_sandbox, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime

DIALECTS = ["mini-swe-agent", "claude-code", "codex"]
"""One harness for each."""


@dataclass(frozen=True)
class Facts:
    """What the trainer takes from the capture."""

    played: Played
    engine_error: None = None
    proxy_error: None = None

    @property
    def policy_turns(self) -> int:
        return len(self.played.end.record.turns)

    @property
    def turn_cap_hit(self) -> bool:
        return self.played.end.turn_cap_hit

    @property
    def over_length(self) -> bool:
        return self.played.end.over_length


def ended(name: str, voices: Sequence[Voice], limits: ScriptedLimits) -> tuple[Scored | Failed, Played]:
    """The trial's outcome as the trainer admits it."""

    async def one() -> Played:
        async with stage([pinned(name)], store(name)) as room:
            return await room.play(name, voices, limits=limits, agent_s=150)

    run = asyncio.run(one())
    assert not run.end.error and not run.end.record.violations
    return admit(run.outcome, Facts(run)), run


def talkative(name: str) -> list[Voice]:
    """Repairs the task in its third turn, then looks at 9,000 characters again and again."""
    voice = repair_voice(name, task())
    look = HANDS[name].run("printf 'x%.0s' $(seq 9000)")
    return [TITLE, voice.model_copy(update={"turns": [*voice.turns[:3], look]})]


@pytest.mark.parametrize("name", HANDS)
def test_a_harness_ends_at_its_turn_cap_and_is_graded(name: str) -> None:
    """The cap is behind the edit, so the work is done although nobody said so."""
    cap = 3 + (name == "opencode")  # its title
    outcome, run = ended(name, [TITLE, repair_voice(name, task())], ScriptedLimits(max_turns=cap))
    assert isinstance(outcome, Scored), (outcome, run.end)
    assert (outcome.reward, outcome.termination, len(run.end.record.turns)) == (1, Termination.MAX_TURNS, cap)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_harness_ends_where_its_tokens_are_used_up_and_is_graded(name: str) -> None:
    """Every byte is a token here."""
    outcome, run = ended(name, talkative(name), ScriptedLimits(token_budget=3_000))
    assert isinstance(outcome, Scored), (outcome, run.end)
    assert (outcome.reward, outcome.termination) == (1, Termination.OVER_LENGTH)
    assert sum(turn.sampled_tokens for turn in run.end.record.turns) == 3_000


@pytest.mark.parametrize("name", ["mini-swe-agent", "codex"])
def test_a_harness_ends_where_its_conversation_is_too_long_behind_the_first_prompt(name: str) -> None:
    """The split of the context into a prompt and a response budget. Claude Code begins a new conversation with a summary instead."""
    outcome, run = ended(name, talkative(name), ScriptedLimits(response_budget=40_000))
    assert isinstance(outcome, Scored), (outcome, run.end)
    assert (outcome.reward, outcome.termination) == (1, Termination.OVER_LENGTH)
    first, last = run.end.record.turns[0], run.end.record.turns[-1]
    assert 25_000 < last.prompt_tokens + last.sampled_tokens - first.prompt_tokens <= 40_000


@pytest.mark.parametrize("name", DIALECTS)
def test_a_first_prompt_beyond_its_budget_says_nothing_about_the_policy(name: str) -> None:
    outcome, run = ended(name, [TITLE, repair_voice(name, task())], ScriptedLimits(prompt_budget=500))
    assert isinstance(outcome, Failed), (outcome, run.end)
    assert outcome.cause is Cause.HARNESS_NEVER_CALLED and run.end.over_length and run.end.record.turns == []
