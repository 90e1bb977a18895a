"""When prompts start, and which of them a step trains. The synchronous schedule is the one with staleness 0.

Versions count weight updates. A step that trains on weights v may take a prompt whose first rollout began under v - `staleness` or later.
Three rules give that without a wait for the slowest:

* At the start of a step, prompts are fed until `staleness` + 1 batches of them are under way or finished. In the order in which they were
  fed, a finished prompt is then taken in time: always with staleness 1; with more, younger ones may have been taken while several batches
  of one age were slow, and the last step that may train those has places for one of them.
* A step takes the finished prompts that were fed first. One that is unfinished when the last step that may train it has its batch is
  dropped, and the next step feeds another in its place: nothing waits for the slowest.
* A step may take its batch in parts and train each while the others are still played. What begins while the last part trains has the
  least time, until the next step has its batch; the smaller that part, the fewer begin there. No part takes the place that a prompt needs
  which this is the last step for, as long as that one may yet finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .slots import Slots

PARTS = 4
"""At most so many parts of a batch, where it is trained in parts. `rl bench async` reaches 94.4 % of the bound of what it trained with two,
96.7 with four, 97.3 with eight; each costs the workers an exchange of gradients of its own."""
EVALUATION, TRAINING = 0, 1
"""Ranks: the trainer waits for an evaluation, so nothing may be in front of it."""


@dataclass(eq=False, slots=True)
class Prompt[M, R]:
    """The rollouts of one prompt. `results` has those that ended, by their number. `begun` is the version under which the first began."""

    name: str
    members: Sequence[M]
    begun: int | None = None
    results: dict[int, R] = field(default_factory=dict)
    dropped: str = ""
    """Why it will not be trained."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    played: asyncio.Task[None] | None = None

    @property
    def finished(self) -> bool:
        return self.played is not None and self.played.done()


class Schedule[M, R]:
    """Not thread-safe: one event loop. `play` runs one rollout, `finish` is called once for each prompt whose rollouts have all ended,
    before it can be taken."""

    def __init__(
        self,
        play: Callable[[M], Awaitable[R]],
        slots: Slots,
        *,
        batch: int,
        staleness: int,
        parts: int = 1,
        finish: Callable[[Prompt[M, R]], Awaitable[None]] | None = None,
        version: int = 0,
    ) -> None:
        self._play, self._slots, self._finish = play, slots, finish
        self._batch, self._staleness, self._part = batch, staleness, -(-batch // parts)
        self._missing = batch
        self._prompts: list[Prompt[M, R]] = []
        self._news = asyncio.Event()
        self._late: list[Prompt[M, R]] = []
        self.version = version
        """Of the engine's weights; set it when it has new ones."""

    @property
    def outstanding(self) -> list[Prompt[M, R]]:
        """Neither trained nor dropped, in the order in which they were fed."""
        return list(self._prompts)

    def wanted(self, batches: int) -> int:
        """How many prompts to feed now, when as many batches are still to be taken in the run."""
        return max(0, min(self._staleness + 1, batches) * self._batch - len(self._prompts))

    def feed(self, prompts: Iterable[tuple[str, Sequence[M]]]) -> None:
        """Start prompts, given as (name, members), behind those that were fed before."""
        for name, members in prompts:
            prompt: Prompt[M, R] = Prompt(name, members)
            prompt.played = asyncio.create_task(self._run(prompt), name=name)
            prompt.played.add_done_callback(lambda _: self._news.set())
            self._prompts.append(prompt)

    @property
    def missing(self) -> int:
        """Prompts that the step under way still lacks; none between two steps."""
        return self._missing % self._batch

    async def take(self) -> list[Prompt[M, R]]:
        """Finished prompts for a step on the present weights: its batch, or the next part of it. Raises what a rollout raised.

        With the last part, what would be too old for the next step is dropped (`take_late`).
        """
        while True:
            self._news.clear()
            finished = [prompt for prompt in self._prompts if prompt.finished]
            for prompt in finished:
                assert prompt.played is not None  # noqa: S101 it has finished
                prompt.played.result()
            if taken := self._choice(finished):
                self._prompts = [prompt for prompt in self._prompts if prompt not in taken]
                self._missing -= len(taken)
                if not self._missing:
                    self._missing = self._batch
                    await self._drop_late()
                return taken
            await self._news.wait()

    def _choice(self, finished: list[Prompt[M, R]]) -> list[Prompt[M, R]]:
        """What to take now; empty: wait. Those that are too old for the next step go first and have a place in the batch until its end."""
        last, others = ([prompt for prompt in finished if self._last_chance(prompt) is last] for last in (True, False))
        if len(finished) >= self._missing:
            return [*last, *others][: self._missing]
        spare = max(0, self._missing - len(self._last_chances()))
        part = [*last, *others[:spare]]
        return part if len(part) >= self._part else []

    def _last_chance(self, prompt: Prompt[M, R]) -> bool:
        """No later step than this may train it."""
        return prompt.begun is not None and prompt.begun < self.version + 1 - self._staleness

    def _last_chances(self) -> list[Prompt[M, R]]:
        return [prompt for prompt in self._prompts if self._last_chance(prompt)]

    async def _drop_late(self) -> None:
        late = self._last_chances()
        without_place, unfinished = ([prompt for prompt in late if prompt.finished is ended] for ended in (True, False))
        batch = f"the last batch was taken that may hold what began before version {self.version + 1 - self._staleness}"
        await self._drop(without_place, f"stale: without a place when {batch}")
        await self._drop(unfinished, f"stale: unfinished when {batch}")
        self._late += late

    def take_late(self) -> list[Prompt[M, R]]:
        """Prompts that were dropped since the last call, with the rollouts of them that had ended."""
        late, self._late = self._late, []
        return late

    async def close(self) -> None:
        """End every rollout."""
        await self._drop(self.outstanding, "the run has ended")

    async def evaluate(self, members: Sequence[M]) -> list[R]:
        """Rollouts outside of the order, in front of those that wait for a place."""
        prompt: Prompt[M, R] = Prompt("evaluation", members)
        await self._all(prompt, EVALUATION)
        return [prompt.results[number] for number in range(len(members))]

    async def _drop(self, prompts: Sequence[Prompt[M, R]], why: str) -> None:
        for prompt in prompts:
            self._prompts.remove(prompt)
            prompt.dropped = why
            for task in prompt.tasks:
                task.cancel(why)
        await asyncio.gather(*(prompt.played for prompt in prompts if prompt.played is not None), return_exceptions=True)

    async def _run(self, prompt: Prompt[M, R]) -> None:
        await self._all(prompt, TRAINING)
        if self._finish is not None and not prompt.dropped:
            await self._finish(prompt)

    async def _all(self, prompt: Prompt[M, R], rank: int) -> None:
        """The first error cancels the rest and is raised as it is."""

        async def one(number: int, member: M) -> None:
            async with self._slots.place(rank):
                if prompt.begun is None:
                    prompt.begun = self.version
                prompt.results[number] = await self._play(member)

        try:
            async with asyncio.TaskGroup() as group:
                prompt.tasks = [group.create_task(one(number, member)) for number, member in enumerate(prompt.members)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
