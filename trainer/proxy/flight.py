"""A model call under way: what it has sampled so far, and the clients that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from trainer.capture.graph import Node, Turn


class Flight:
    """Clients read `tokens` at their own pace, so a slow one holds nobody up and costs no buffer of its own.

    `tokens` are those that the engine streamed; the turn, on which `landing` is done, holds all of them. `waiters` counts the clients.
    """

    def __init__(self, call: bytes, prompt_tokens: int, scaffold: list[int]) -> None:
        self.call, self.prompt_tokens, self.scaffold = call, prompt_tokens, scaffold
        self.tokens: list[int] = []
        self.waiters = 0
        self.engine_s = 0.0
        """Seconds that the engine took, the gate before it included."""
        self.node: Node | None = None
        """Where in the graph the turn will hang."""
        self.task: asyncio.Task[None] | None = None
        self.landing: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._sleepers: list[asyncio.Future[None]] = []

    @classmethod
    def over(cls, turn: Turn) -> Flight:
        """One that has landed: a stored answer."""
        flight = cls(turn.call, turn.prompt_tokens, turn.ids[: turn.scaffold].tolist())
        flight.landing.set_result(turn)
        return flight

    def take_off(self, sampling: Callable[[], Coroutine[Any, Any, Turn]], name: str) -> asyncio.Task[None]:
        # Eager: the engine need not wait until the loop comes round.
        self.task = asyncio.Task(self._fly(sampling), loop=asyncio.get_running_loop(), name=name, eager_start=True)
        return self.task

    def take(self, ids: list[int], _: list[float]) -> None:
        """`OnTokens`."""
        self.tokens += ids
        self._wake()

    async def turn(self) -> Turn:
        """Raises what the call raised. Cancelling the caller leaves the call alone."""
        return await asyncio.shield(self.landing)

    def news(self, seen: int) -> asyncio.Future[Any]:
        """Done when there are more than `seen` tokens, or the turn."""
        if self.landing.done():
            return self.landing
        news = asyncio.get_running_loop().create_future()
        if len(self.tokens) > seen:
            news.set_result(None)
        else:
            self._sleepers.append(news)
        return news

    def cancel(self, why: Exception) -> bool:
        """Abort the call; whoever still waits gets `why`. False when the turn was there already."""
        if self.landing.done() or self.task is None:
            return False
        self._fail(why)
        self.task.cancel()
        self._wake()
        return True

    async def _fly(self, sampling: Callable[[], Coroutine[Any, Any, Turn]]) -> None:
        try:
            turn = await sampling()
        except Exception as error:  # noqa: BLE001  (whoever waits is told, whatever it is)
            if not self.landing.done():
                self._fail(error)
                self._wake()
            return
        if not self.landing.done():
            self.landing.set_result(turn)
            self._wake()

    def _fail(self, error: BaseException) -> None:
        self.landing.set_exception(error)
        self.landing.exception()  # it is no fault when nobody is left to hear of it

    def _wake(self) -> None:
        for sleeper in self._sleepers:
            sleeper.set_result(None)
        self._sleepers.clear()
