"""The scheduler of real runs (`trainer.rollout.schedule`) over simulated trials on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.rollout.schedule import PARTS, Prompt, Schedule
from trainer.rollout.slots import Slots

from . import clock
from .workload import Curve, Workload, curve, duration

Member = tuple[int, int]
"""Prompt and member."""


@dataclass(frozen=True, slots=True)
class Drop:
    prompt: int
    reason: str
    age_s: float
    """Seconds since its first trial began."""
    unfinished: int
    """Trials that had not ended by then, which is why no step could take it."""


@dataclass(frozen=True, slots=True)
class Course:
    """`seconds`: from the first trial to the end of the last step. `waited_share`: of that time the trainer waited for rollouts."""

    staleness: int
    seconds: float
    step_s: float
    waited_share: float
    busy_share: float
    lags: dict[int, int]
    """Steps' prompts by how many updates after their beginning they were trained."""
    trained_s: float
    """Seconds of all trials that were trained."""
    drops: list[Drop]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`bound_s`: no schedule of the first trials, as many as the steps take, can be faster on these slots, whatever staleness it has.
    `trained_bound_s`: the same of the trials that the asynchronous one trained. Dropped are the slowest, so there is less work in them."""

    sync: Course
    asynchronous: Course
    bound_s: float
    trained_bound_s: float

    @property
    def of_bound(self) -> float:
        return self.bound_s / self.asynchronous.seconds

    @property
    def of_trained_bound(self) -> float:
        """What was dropped counts as waste here."""
        return self.trained_bound_s / self.asynchronous.seconds

    @property
    def ratio(self) -> float:
        return self.sync.seconds / self.asynchronous.seconds

    @property
    def passed(self) -> bool:
        """90 % of both bounds, no prompt trained with more lag than allowed, and none dropped that had finished."""
        course = self.asynchronous
        reached = min(self.of_bound, self.of_trained_bound) >= 0.9
        return reached and max(course.lags) <= course.staleness and all(drop.unfinished for drop in course.drops)

    def as_json(self) -> dict[str, Any]:
        figures = {"bound_s": self.bound_s, "async_of_bound": self.of_bound, "async_of_trained_bound": self.of_trained_bound}
        figures |= {"sync_over_async": self.ratio, "passed": self.passed}
        return {"sync": asdict(self.sync), "async": asdict(self.asynchronous)} | figures

    def lines(self) -> list[str]:
        lines = []
        for name, course in (("sync", self.sync), ("async", self.asynchronous)):
            lags = ", ".join(f"{count} of lag {lag}" for lag, count in sorted(course.lags.items()))
            lines.append(
                f"{name:6s}{course.seconds / 3600:7.2f} h  {course.step_s:6.0f} s a step  slots busy {course.busy_share:.1%}"
                f"  trainer waits {course.waited_share:.1%}  {lags}  {len(course.drops)} dropped"
            )
            reasons = Counter(drop.reason.partition(":")[0] for drop in course.drops)
            for reason, count in reasons.items():
                ages = sorted(drop.age_s for drop in course.drops)
                lines.append(
                    f"        {count} {reason}: trials unfinished after {ages[0]:.0f} to {ages[-1]:.0f} s, as the slowest of a group are"
                )
        lines.append(
            f"bound {self.bound_s / 3600:7.2f} h: async reaches {self.of_bound:.1%} of it ({self.of_trained_bound:.1%} of that of the"
            f" trials it trained) and is {self.ratio:.2f} times as fast as sync"
        )
        return lines


def compare(workload: Workload) -> Comparison:
    shape = curve(workload.durations)
    sync, asynchronous = (clock.run(simulate(workload, shape, staleness)) for staleness in (0, workload.staleness))
    return Comparison(sync, asynchronous, bound(workload, shape), _bound(workload, asynchronous.trained_s, 0.0))


def bound(workload: Workload, shape: Curve) -> float:
    """Either the slots are never idle until the last prompt is trained, or the trainer never is once the first prompt could be there."""
    prompts = range(workload.steps * workload.tasks_per_step)
    work = [sum(duration(workload, shape, prompt, member) for member in range(workload.group_size)) for prompt in prompts]
    return _bound(workload, sum(work), min(work))


def _bound(workload: Workload, work: float, first: float) -> float:
    generate = work / workload.slots + workload.trainer_s / workload.tasks_per_step + workload.sync_s
    return max(generate, first / workload.slots + workload.steps * (workload.trainer_s + workload.sync_s))


async def simulate(workload: Workload, shape: Curve, staleness: int) -> Course:
    loop, slots = asyncio.get_running_loop(), Slots(workload.slots)
    paused = 0.0
    started: dict[int, float] = {}

    async def play(member: Member) -> None:
        """Generation stands still while weights are sent."""
        started.setdefault(member[0], loop.time())
        owed = duration(workload, shape, *member)
        while owed > 0:
            before = paused
            await asyncio.sleep(owed)
            owed = paused - before

    batch, parts = workload.tasks_per_step, PARTS if staleness else 1
    schedule: Schedule[Member, None] = Schedule(play, slots, batch=batch, staleness=staleness, parts=parts)
    numbers = itertools.count()

    def feed(batches: int) -> None:
        fed = itertools.islice(numbers, schedule.wanted(batches))
        schedule.feed((str(prompt), [(prompt, member) for member in range(workload.group_size)]) for prompt in fed)

    waited, trained, lags, drops = 0.0, 0.0, Counter[int](), list[Drop]()
    for step in range(1, workload.steps + 1):  # in the order of `trainer.verl_plugin`
        feed(workload.steps - step + 1)
        while True:
            began = loop.time()
            taken = await schedule.take()
            waited += loop.time() - began
            lags.update(_lags(taken, step - 1))
            trained += sum(duration(workload, shape, *member) for prompt in taken for member in prompt.members)
            for prompt in schedule.take_late():
                number = int(prompt.name)
                unfinished = len(prompt.members) - len(prompt.results)
                drops.append(Drop(number, prompt.dropped, loop.time() - started[number], unfinished))
            await asyncio.sleep(workload.trainer_s * len(taken) / batch)
            if not schedule.missing:
                break
        paused += workload.sync_s
        await asyncio.sleep(workload.sync_s)
        schedule.version = step
    seconds = loop.time()
    busy = slots.busy_share()
    await schedule.close()
    return Course(staleness, seconds, seconds / workload.steps, waited / seconds, busy, dict(lags), trained, drops)


def _lags(taken: Sequence[Prompt[Member, None]], version: int) -> list[int]:
    return [version - prompt.begun for prompt in taken if prompt.begun is not None]
