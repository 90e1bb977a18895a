"""Policy-relative sampling: which tasks teach the present policy something.

A group whose rollouts all have one reward gives no gradient (paper 3.1.1, Eq. 1). The pool keeps a running estimate of each task's solve
rate and draws tasks in proportion to the chance that their next group has both rewards. Tasks that are solved (or hopeless) are retired
and come back for a look now and then, since the policy changes. A task that was never played is uncertain, so it is likely to be drawn.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma

from server.schemas.rundir import TaskMemory
from server.schemas.runspec import Relative


@dataclass(slots=True)
class PoolStep:
    """What the pool saw of one step's groups."""

    groups: int
    without_signal: int


class TaskPool:
    """`memory` is how much an earlier group counts when a new one of the task arrives. Draws follow from seed and number of the draw."""

    def __init__(self, tasks: Sequence[str], rule: Relative, group_size: int, seed: int) -> None:
        self._rule, self._size, self._seed = rule, group_size, seed
        self._known = {task: TaskMemory() for task in dict.fromkeys(tasks)}
        self._draws = 0

    def chance(self, task: str) -> float:
        """That the task's next group has both rewards, when all of its rollouts are scored: the solve rate p is Beta-distributed after a
        uniform prior, so this is 1 - E[p^G] - E[(1-p)^G]."""
        known = self._known[task]
        solved, failed = 1 + known.solved, 1 + known.scored - known.solved
        return 1 - _moment(solved, failed, self._size) - _moment(failed, solved, self._size)

    def choose(self, count: int, step: int, busy: Collection[str] = ()) -> list[str]:
        """Tasks for groups of `step`, each once unless fewer are to be had. Those in `busy` are being played."""
        self._draws += 1
        rng = random.Random(f"{self._seed}/{self._draws}")  # noqa: S311  a reproducible draw, no secret
        free = [task for task in self._known if task not in busy] or list(self._known)
        active = [task for task in free if not self._retired(task, step)]
        # Efraimidis and Spirakis: the largest of u^(1/w) are a draw without replacement in proportion to w.
        ranked = sorted(active, key=lambda task: -(rng.random() ** (1 / self.chance(task))))
        spare = sorted((task for task in free if task not in set(active)), key=lambda _: rng.random())
        order = [*ranked, *spare]
        chosen = [order[i % len(order)] for i in range(count)]
        for task in chosen:
            self._known[task].drawn = step
        return chosen

    def note(self, groups: Iterable[tuple[str, int, int]]) -> PoolStep:
        """(task, solved, scored) of groups that were played; a group of failures alone says nothing."""
        seen = PoolStep(0, 0)
        for task, solved, scored in groups:
            known = self._known.get(task)
            if known is None or not scored:
                continue
            for name, new in (("solved", solved), ("scored", scored), ("groups", 1)):
                setattr(known, name, self._rule.memory * getattr(known, name) + new)
            seen.groups += 1
            seen.without_signal += solved in (0, scored)
        return seen

    def metrics(self, step: int, seen: PoolStep) -> dict[str, float]:
        """`static_zero_variance` is what a draw from all tasks that were seen is expected to lose, `saved` how much less the step lost.

        Expected by the solve rates, not counted in the groups that the tasks had: a task is retired for groups without signal, chance
        ones too, and not looked at until later, so their share among what was seen is too large. This one is rather too small.
        """
        played = [task for task, known in self._known.items() if known.groups]
        expected = sum(1 - self.chance(task) for task in played) / max(1, len(played))
        lost = seen.without_signal / seen.groups if seen.groups else 0.0
        return {
            "lego/pool/tasks": float(len(self._known)),
            "lego/pool/seen": float(len(played)),
            "lego/pool/retired": float(sum(self._retired(task, step) for task in self._known)),
            "lego/pool/zero_variance": lost,
            "lego/pool/static_zero_variance": expected,
            "lego/pool/saved": expected - lost,
        }

    @property
    def memory(self) -> dict[str, TaskMemory]:
        """Of the tasks that were drawn, for a checkpoint."""
        return {task: known.model_copy() for task, known in self._known.items() if known != TaskMemory()}

    def remember(self, memory: Mapping[str, TaskMemory], draws: int) -> None:
        """Go on where a checkpoint left off."""
        self._draws = draws
        self._known |= {task: known.model_copy() for task, known in memory.items() if task in self._known}

    @property
    def draws(self) -> int:
        return self._draws

    def _retired(self, task: str, step: int) -> bool:
        return self.chance(task) < self._rule.retire_below and step - self._known[task].drawn < self._rule.revisit_steps


def _moment(a: float, b: float, power: int) -> float:
    """E[p^power] of a Beta(a, b)."""
    return exp(lgamma(a + power) + lgamma(a + b) - lgamma(a) - lgamma(a + b + power))
