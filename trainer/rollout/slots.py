"""Places for trials, handed out by rank and then in order of arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """`count` places. A waiting caller of a lower `rank` goes first; nobody is pushed out of a place it has."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._busy = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._measured_from = self._changed = self._loop.time()
        self._busy_seconds = 0.0

    @asynccontextmanager
    async def place(self, rank: int = 0) -> AsyncIterator[None]:
        if self._busy < self.count:
            self._note(+1)
        else:
            await self._turn(rank)
        try:
            yield
        finally:
            self._leave()

    def busy_share(self) -> float:
        """Share of the places' time that was in use since the last call; NaN when no time has passed."""
        self._note(0)
        elapsed, busy = self._changed - self._measured_from, self._busy_seconds
        self._measured_from, self._busy_seconds = self._changed, 0.0
        return busy / (elapsed * self.count) if elapsed else float("nan")

    async def _turn(self, rank: int) -> None:
        """Wait for a place that somebody leaves; it is passed on without becoming free in between."""
        turn = self._loop.create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._note(-1)

    def _note(self, change: int) -> None:
        now = self._loop.time()
        self._busy_seconds += self._busy * (now - self._changed)
        self._changed = now
        self._busy += change
