"""An event loop whose time jumps to the next timer instead of passing: hours of schedule in milliseconds, the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Standstill(Exception):
    """Nothing is due and everything waits: what runs on the loop is in a deadlock."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise Standstill("every task waits for another one")
        if timeout and not ready:
            self._loop.now += timeout
        return ready


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a loop of its own. Raises Standstill instead of waiting for ever."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
