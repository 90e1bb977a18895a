"""Can this machine grade these tasks? Sampled tasks go through whole trials: solved by their solution, not at all, and by cheats."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox.harnesses.base import HarnessAgent, Launcher
from sandbox.harnesses.reference import Noop, Oracle, Script
from sandbox.harnesses.store import Store
from sandbox.integrity.cheats import CHEATS
from server.schemas.outcome import Failed, Scored, Stage
from server.schemas.probes import SelfTestFacts, TaskReward
from server.schemas.runspec import Data, Harness, RunSpec
from server.schemas.tasks import HELD_OUT, TRAIN
from server.schemas.trials import ProxyEndpoint, TrialRequest

from .drive import Attempt, Room
from .outcomes import decide
from .service import NotReady, open_room

NO_PROXY = ProxyEndpoint.model_validate({"url": "http://127.0.0.1:9", "key": "none"})
_PLANTED = {name: CHEATS[name] for name in ("early-exit", "answers-for-the-check")}
"""What earns the reward where a check runs graded code in its own process. The second one knows how our grader talks to itself."""


class _Silent:
    def enter(self, stage: Stage) -> None:
        """A self-test reports its end only."""


SILENT = _Silent()


@contextlib.asynccontextmanager
async def reference_room(spec: RunSpec, tasks: int, cheats: dict[str, str]) -> AsyncIterator[tuple[Room, str]]:
    """A room with `tasks` tasks of each split whose harnesses are `oracle`, `noop` and one per cheat; with it, how limits are enforced.

    Raises NotReady.
    """
    agents: dict[str, type[HarnessAgent]] = {"oracle": Oracle, "noop": Noop, **dict.fromkeys(cheats, Script)}
    launchers = {name: Launcher(Harness(name=name, version="1"), script=cheats.get(name, "")) for name in agents}
    with tempfile.TemporaryDirectory(prefix="lego-selftest-") as scratch:
        root = Path(scratch)
        (root / "trials").mkdir()
        small = spec.model_copy(update={"data": _sample(spec.data, tasks), "harnesses": []})
        async with open_room(small, Store(root), root / "tasks", root / "trials", root / "sandboxes", limit=tasks) as (room, host):
            yield dataclasses.replace(room, agents=agents, launchers=launchers), host.limits_mode


def _sample(data: Data, tasks: int) -> Data:
    if data.family is None:
        return data
    return data.model_copy(update={"train_tasks": min(tasks, data.train_tasks), "held_out_tasks": min(tasks, data.held_out_tasks)})


async def play_all(room: Room) -> dict[tuple[str, str], tuple[Scored | Failed, str]]:
    """(task, harness) → outcome and the grader's last word on it, for every task with every harness of the room."""
    slots = asyncio.Semaphore(room.spec.sandbox.concurrency)
    outcomes: dict[tuple[str, str], tuple[Scored | Failed, str]] = {}

    async def one(split: str, task: str, harness: str) -> None:
        number = f"{harness}-{len(room.index[TRAIN]) * (split == HELD_OUT) + room.index[split].index(task)}"
        budgets = room.spec.sandbox.budgets
        request = TrialRequest(trial_id=number, task=task, split=split, harness=harness, proxy=NO_PROXY, budgets=budgets)
        async with slots:
            facts = await Attempt(room, request, number, SILENT).run()
            outcomes[task, harness] = decide(facts), facts.verdict.detail.strip().rpartition("\n")[2] if facts.verdict else ""

    await asyncio.gather(*(one(split, task, name) for split in (TRAIN, HELD_OUT) for task in room.index[split] for name in room.agents))
    return outcomes


async def selftest(spec: RunSpec, tasks: int) -> SelfTestFacts:
    """Grade `tasks` tasks of each split. What keeps that from happening is in `problems`; rewards are for the caller to judge.

    A reward earned by the cheat is a problem: that task's check can be fooled.
    """
    try:
        async with reference_room(spec, tasks, _PLANTED) as (room, limits_mode):
            outcomes = await play_all(room)
    except NotReady as error:
        return SelfTestFacts(problems=[str(error)])
    facts = SelfTestFacts(limits_mode=limits_mode)
    for (task, harness), (outcome, last_word) in outcomes.items():
        reward = float(outcome.reward) if isinstance(outcome, Scored) else None
        if isinstance(outcome, Failed):
            facts.problems.append(f"task {task} with {harness}: {outcome.cause} in stage {outcome.stage}: {outcome.detail}")
        if harness in _PLANTED and reward == 1:
            facts.problems.append(
                f"task {task}: a file that solves nothing earns the reward ({harness}); its check must run graded code in another process, "
                "or be hidden pytest tests"
            )
        elif harness not in _PLANTED:
            (facts.oracle if harness == "oracle" else facts.noop).append(TaskReward(task=task, reward=reward, detail=last_word))
    return facts
