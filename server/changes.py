"""Tells waiting requests that something of a run changed. Writers are threads, waiters are coroutines."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Changes:
    """Belongs to one event loop; `notify` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def notify(self, key: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, key)

    async def wait(self, key: str, timeout_s: float) -> None:
        """Until the next `notify(key)`, at the longest `timeout_s`."""
        event = asyncio.Event()
        self._waiting[key].add(event)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting[key].discard(event)
            if not self._waiting[key]:
                del self._waiting[key]

    def _wake(self, key: str) -> None:
        for event in self._waiting.get(key, ()):
            event.set()
