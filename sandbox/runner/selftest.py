"""Can this machine grade these tasks? Sampled tasks go through whole trials: solved by their solution, not at all, and by a cheat."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path

from sandbox.harnesses.base import HarnessAgent, Launcher
from sandbox.harnesses.reference import EarlyExit, Noop, Oracle
from sandbox.harnesses.store import Store
from server.schemas.outcome import Scored, Stage
from server.schemas.probes import SelfTestFacts, TaskReward
from server.schemas.runspec import Data, Harness, RunSpec
from server.schemas.tasks import HELD_OUT, TRAIN
from server.schemas.trials import ProxyEndpoint, TrialRequest

from .drive import Attempt, Room
from .outcomes import decide
from .service import NotReady, open_room

_AGENTS: tuple[type[HarnessAgent], ...] = (Oracle, Noop, EarlyExit)
_NO_PROXY = ProxyEndpoint.model_validate({"url": "http://127.0.0.1:9", "key": "none"})


class _Silent:
    def enter(self, stage: Stage) -> None:
        """A self-test reports its end only."""


async def selftest(spec: RunSpec, tasks: int) -> SelfTestFacts:
    """Grade `tasks` tasks of each split. What keeps that from happening is in `problems`; rewards are for the caller to judge.

    A reward earned by the cheat is a problem: that task's check can be fooled.
    """
    with tempfile.TemporaryDirectory(prefix="lego-selftest-") as scratch:
        root = Path(scratch)
        (root / "trials").mkdir()
        small = spec.model_copy(update={"data": _sample(spec.data, tasks), "harnesses": []})
        try:
            async with open_room(small, Store(root), root / "tasks", root / "trials", root / "sandboxes", limit=tasks) as (room, host):
                return await _grade(room, host.limits_mode)
        except NotReady as error:
            return SelfTestFacts(problems=[str(error)])


def _sample(data: Data, tasks: int) -> Data:
    if data.family is None:
        return data
    return data.model_copy(update={"train_tasks": min(tasks, data.train_tasks), "held_out_tasks": min(tasks, data.held_out_tasks)})


async def _grade(room: Room, limits_mode: str) -> SelfTestFacts:
    named = {agent.name(): agent for agent in _AGENTS}
    launchers = {name: Launcher(Harness(name=name, version="1")) for name in named}
    room = dataclasses.replace(room, agents=named, launchers=launchers)
    slots = asyncio.Semaphore(room.spec.sandbox.concurrency)
    facts = SelfTestFacts(limits_mode=limits_mode)

    async def one(split: str, task: str, name: str) -> None:
        trial_id = f"{name}-{split}-{task}"[:100]
        budgets = room.spec.sandbox.budgets
        request = TrialRequest(trial_id=trial_id, task=task, split=split, harness=name, proxy=_NO_PROXY, budgets=budgets)
        async with slots:
            outcome = decide(await Attempt(room, request, trial_id, _Silent()).run())
        reward = float(outcome.reward) if isinstance(outcome, Scored) else None
        if not isinstance(outcome, Scored):
            facts.problems.append(f"task {task} with {name}: {outcome.cause} in stage {outcome.stage}: {outcome.detail}")
        if name == EarlyExit.name():
            if reward == 1:
                facts.problems.append(
                    f"task {task}: a file that only exits early earns the reward; its check must run graded code elsewhere"
                )
        else:
            (facts.oracle if name == Oracle.name() else facts.noop).append(TaskReward(task=task, reward=reward))

    await asyncio.gather(*(one(split, task, name) for split in (TRAIN, HELD_OUT) for task in room.index[split] for name in named))
    return facts
