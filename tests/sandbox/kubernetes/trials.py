"""Whole trials in pods while something happens to the cluster, and what may become of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import decide
from server.schemas.outcome import ADMISSION, Cause, Failed, Fault, Scored, Termination
from tests.sandbox.environments.test_contract import processes
from tests.sandbox.support import Stages, request, solution

MARK = "4731.25"
"""Seconds that nobody else sleeps."""
Meanwhile = Callable[[asyncio.Task[Any]], Coroutine[Any, Any, None]]


async def play(room: Room, name: str, script: str, meanwhile: Meanwhile) -> Scored | Failed:
    """A trial whose agent solves the task and goes on with `script`. `meanwhile` gets the trial, from when the agent is about to run."""
    room.launchers["script"].script = f"{solution(room)}; {script}"
    stages = Stages()
    trial = asyncio.create_task(Attempt(room, request(room, name, "script"), name, stages).run())
    await stages.agent_runs.wait()
    meddling = asyncio.create_task(meanwhile(trial))
    outcome = decide(await trial)
    await meddling
    assert not processes(f"sleep {MARK}")
    return outcome


def lost(outcome: Scored | Failed, *words: str, causes: tuple[Cause, ...] = (Cause.RUNNER_LOST,)) -> None:
    """A failure of the cluster: nothing to learn from, and no fault of the policy."""
    assert isinstance(outcome, Failed), outcome
    assert outcome.cause in causes and all(word in outcome.detail for word in words), outcome
    assert not ADMISSION[outcome.cause].trained and ADMISSION[outcome.cause].fault is not Fault.POLICY


def own_fault(outcome: Scored | Failed, words: str) -> None:
    assert isinstance(outcome, Scored), outcome
    assert (outcome.reward, outcome.termination) == (0, Termination.AGENT_FAULT) and words in outcome.detail, outcome


def solved(outcome: Scored | Failed) -> None:
    assert outcome == Scored(reward=1, termination=Termination.COMPLETED)
