"""Which trials a step or an evaluation consists of. Everything is decided by (seed, step, task), so a step can be planned again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from server.schemas.runspec import Harness
from server.schemas.states import Phase

LONGEST_TASK = 80
"""Characters of the task's name inside an id; ids are at most 100 long."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What decides the groups of a run beside step and task. `attempt` counts the starts of the trainer: a step that was lost with one
    is played again under new ids."""

    harnesses: Sequence[Harness]
    seed: int
    attempt: int = 1
    by: Literal["group", "trajectory"] = "group"
    """What draws a harness in training."""
    evaluated_in: str | None = None
    """The harness of all evaluations; None: each task draws one."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Task → the harness that its index names."""


@dataclass(frozen=True, slots=True)
class Group:
    """`size` rollouts of one (task, harness), numbered from `first`. `uid` is verl's name of the prompt, empty in an evaluation; groups of
    one task in different harnesses share it, and the numbering."""

    group_id: str
    step: int
    phase: Phase
    task: str
    harness: str
    size: int
    uid: str = ""
    first: int = 0

    @property
    def samples(self) -> range:
        return range(self.first, self.first + self.size)

    def trial_id(self, sample: int, attempt: int = 1) -> str:
        return f"{self.group_id}-{sample}" if attempt == 1 else f"{self.group_id}-{sample}.{attempt}"


def make_groups(plan: Plan, phase: Phase, step: int, task: str, size: int, uid: str = "", occurrence: int = 1) -> list[Group]:
    """`step` is the optimizer step being prepared (train) or the number of steps done (eval). A task that the order of the data puts into a
    step twice has a second `occurrence`.

    One group, or one for each harness that was drawn when every trajectory draws its own. An evaluation draws without the step, so that
    all evaluations of a run compare the same pairs.
    """
    drawn_at = f"{plan.seed}/{step if phase is Phase.TRAIN else 0}/{task}"
    named = plan.evaluated_in if phase is Phase.EVAL and plan.evaluated_in else plan.fixed.get(task)
    again = (f"r{plan.attempt}" if plan.attempt > 1 else "") + (f"x{occurrence}" if occurrence > 1 else "")
    name = f"{'s' if phase is Phase.TRAIN else 'e'}{step:03d}{again}"
    if named is not None or plan.by == "group" or phase is Phase.EVAL:
        harness = named or draw_harness(plan.harnesses, drawn_at).name
        return [Group(f"{name}-{_short(task)}", step, phase, task, harness, size, uid)]
    drawn = [draw_harness(plan.harnesses, f"{drawn_at}/{sample}").name for sample in range(size)]
    groups: list[Group] = []
    for number, possible in enumerate(plan.harnesses):
        if count := drawn.count(possible.name):
            first = sum(group.size for group in groups)
            groups.append(Group(f"{name}h{number}-{_short(task)}", step, phase, task, possible.name, count, uid, first))
    return groups


def evaluation_sizes(tasks: Sequence[str], rollouts: int) -> list[tuple[str, int]]:
    """Spread `rollouts` over the held-out tasks as evenly as possible, the same tasks at every evaluation."""
    count = min(len(tasks), rollouts)
    each, more = divmod(rollouts, count)
    return [(task, each + (i < more)) for i, task in enumerate(tasks[:count])]


def draw_harness(harnesses: Sequence[Harness], drawn_at: str) -> Harness:
    """One harness with probability proportional to its weight, from a hash: no state, the same on every machine."""
    digest = hashlib.sha256(drawn_at.encode()).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64 * sum(harness.weight for harness in harnesses)
    for harness in harnesses:
        point -= harness.weight
        if point < 0:
            return harness
    return harnesses[-1]  # rounding in the sum


def trial_seed(seed: int, trial_id: str) -> int:
    """A seed for one trial, 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{trial_id}".encode()).digest()[:4], "big") >> 1


def _short(task: str) -> str:
    if len(task) <= LONGEST_TASK:
        return task
    return f"{task[: LONGEST_TASK - 9]}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"
