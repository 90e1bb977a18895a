"""Which trials a step or an evaluation consists of. Everything is decided by (seed, step, task), so a step can be planned again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Group:
    """`size` rollouts of one (task, harness). `uid` is verl's name of the prompt, empty in an evaluation."""

    group_id: str
    step: int
    phase: Phase
    task: str
    harness: str
    size: int
    uid: str = ""

    def trial_id(self, sample: int, attempt: int = 1) -> str:
        return f"{self.group_id}-{sample}" if attempt == 1 else f"{self.group_id}-{sample}.{attempt}"


def make_group(plan: Plan, phase: Phase, step: int, task: str, size: int, uid: str = "") -> Group:
    """`step` is the optimizer step being prepared (train) or the number of steps done (eval).

    An evaluation draws the harness without the step, so that all evaluations of a run compare the same pairs.
    """
    drawn_at = step if phase is Phase.TRAIN else 0
    harness = draw_harness(plan.harnesses, plan.seed, drawn_at, task)
    again = f"r{plan.attempt}" if plan.attempt > 1 else ""
    return Group(f"{'s' if phase is Phase.TRAIN else 'e'}{step:03d}{again}-{_short(task)}", step, phase, task, harness.name, size, uid)


def evaluation_sizes(tasks: Sequence[str], rollouts: int) -> list[tuple[str, int]]:
    """Spread `rollouts` over the held-out tasks as evenly as possible, the same tasks at every evaluation."""
    count = min(len(tasks), rollouts)
    each, more = divmod(rollouts, count)
    return [(task, each + (i < more)) for i, task in enumerate(tasks[:count])]


def draw_harness(harnesses: Sequence[Harness], seed: int, step: int, task: str) -> Harness:
    """One harness with probability proportional to its weight, from a hash: no state, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{step}/{task}".encode()).digest()
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
