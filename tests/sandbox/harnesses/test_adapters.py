"""An adapter that fails says nothing about the policy, whatever it raises and whenever: its trial is never graded."""

from __future__ import annotations

import asyncio
from typing import override

import pytest

from sandbox.harnesses.base import HarnessAgent, HarnessError
from sandbox.harnesses.reference import Script
from sandbox.integrity.environment import TrialEnvironment
from sandbox.runner.outcomes import decide
from server.schemas.outcome import Cause, Failed, Stage
from tests.sandbox.support import needs_sandbox, play, script_room, solution

pytestmark = needs_sandbox


class OfItsOwn(HarnessError):
    """Harbor knows errors by the names of their classes."""


class Late(Script):
    """Its harness solves the task, and then it fails."""

    error: Exception = KeyError("a fault of the adapter")

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        await super().launch(instruction, environment)
        raise self.error


class LateByName(Late):
    error = OfItsOwn("a fault of the adapter")


class LateByTime(Late):
    error = TimeoutError("a fault of the adapter")


class Early(Script):
    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        raise KeyError("a fault of the adapter")


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        (Late, Cause.RUNNER_LOST),
        (LateByName, Cause.RUNNER_LOST),
        (LateByTime, Cause.RUNNER_LOST),
        (Early, Cause.AGENT_SETUP),  # nothing of the policy's ran, so it is tried again
    ],
)
def test_a_fault_of_the_adapter_is_no_reward(agent: type[HarnessAgent], cause: Cause) -> None:
    async def one() -> None:
        async with script_room() as room:
            room.agents["script"] = agent
            facts, _ = await play(room, solution(room))
            outcome = decide(facts)
            assert isinstance(outcome, Failed)
            assert (outcome.stage, outcome.cause) == (Stage.AGENT, cause)
            assert "a fault of the adapter" in outcome.detail

    asyncio.run(one())
