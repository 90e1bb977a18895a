"""Real runs of pinned harnesses; their runtimes are fetched once and kept."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest

from sandbox.harnesses.commands import BUILT_IN
from sandbox.harnesses.pins import PINS
from sandbox.harnesses.stage import CONTEXT, Played, stage
from sandbox.harnesses.store import RuntimeStoreError, Store
from server.schemas.runspec import Harness
from server.schemas.scripted import Voice
from tests.support.whole import RUNTIMES


@functools.cache
def store(name: str) -> Store:
    """The store with this harness in it. Skips the calling test when it cannot be fetched."""
    found = Store(RUNTIMES)
    if name in PINS:
        try:
            found.install(PINS[name])
        except RuntimeStoreError as error:
            pytest.skip(f"the runtime cannot be fetched: {error}")
    return found


def pinned(name: str) -> Harness:
    return Harness(name=name, version=PINS[name].version if name in PINS else BUILT_IN[name])


def played(name: str, voices: Sequence[Voice], context: int = CONTEXT, **limits: int) -> Played:
    """One trial in a room of its own."""

    async def one() -> Played:
        async with stage([pinned(name)], store(name), context, **limits) as room:
            return await room.play(name, voices)

    return asyncio.run(one())
