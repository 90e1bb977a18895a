"""A runner's room with agents that play a shell script, and whole trials in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sandbox.environments.namespace.preflight import default_mode, problems
from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import Facts
from sandbox.runner.selftest import reference_room
from server.schemas.outcome import Stage
from server.schemas.runspec import RunSpec
from server.schemas.tasks import TRAIN
from server.schemas.trials import TrialRequest

needs_sandbox = pytest.mark.skipif(bool(problems(default_mode())), reason="; ".join(problems(default_mode())))


def spec(**changes: object) -> RunSpec:
    document = {
        "model": {"path": "builtin:none"},
        "harnesses": [{"name": "mini-swe-agent", "version": "2.4.6", "start": "warm_fork"}],
        "data": {"family": "onebug", "train_tasks": 4, "held_out_tasks": 2},
        "sandbox": {"concurrency": 8, "limits": {"memory_mb": 128, "processes": 32, "cpu_s": 20, "disk_mb": 16}},
    }
    return RunSpec.model_validate(document | changes)


@contextlib.asynccontextmanager
async def script_room(run_spec: RunSpec | None = None, tasks: int = 4) -> AsyncIterator[Room]:
    """A room with harnesses `script` (its launcher's script is for the test to set), `oracle` and `noop`."""
    async with reference_room(run_spec or spec(), tasks, {"script": ""}) as (room, _):
        yield room


class Stages:
    def __init__(self) -> None:
        self.seen: list[Stage] = []
        self.agent_runs = asyncio.Event()

    def enter(self, stage: Stage) -> None:
        self.seen.append(stage)
        if stage is Stage.AGENT:
            self.agent_runs.set()


def request(room: Room, trial_id: str, harness: str, number: int = 0, **budgets: float) -> TrialRequest:
    return TrialRequest.model_validate(
        {
            "trial_id": trial_id,
            "task": room.index[TRAIN][number],
            "harness": harness,
            "proxy": {"url": "http://127.0.0.1:9/rollout/x", "key": "secret-key-of-the-rollout"},
            "budgets": budgets,
        }
    )


async def play(room: Room, script: str, number: int = 0, trial_id: str = "t", **budgets: float) -> tuple[Facts, Attempt]:
    """One whole trial in which the agent runs `script`."""
    asked = request(room, trial_id, "script", number, **budgets)
    room.launchers["script"].script = script
    attempt = Attempt(room, asked, trial_id, Stages())
    return await attempt.run(), attempt


def solution(room: Room, number: int = 0) -> str:
    """The command that solves the task."""
    return (room.tasks / TRAIN / room.index[TRAIN][number] / "solution" / "solve.sh").read_text().splitlines()[-1]


def in_room(body: Callable[[Room], Awaitable[None]], run_spec: RunSpec | None = None, tasks: int = 4) -> None:
    async def main() -> None:
        async with script_room(run_spec, tasks) as room:
            await body(room)

    asyncio.run(main())
