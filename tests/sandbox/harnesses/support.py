"""Real runs of pinned harnesses; their runtimes are fetched once and kept."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest

from sandbox.harnesses.pins import PINS
from sandbox.harnesses.stage import CONTEXT, Played, stage
from sandbox.harnesses.store import RuntimeStoreError, RuntimeTampered, Store
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
            try:
                found.verify(PINS[name], deep=False)
            except RuntimeTampered:  # somebody ran it outside a sandbox, and it wrote beside its own files
                found.install(PINS[name], again=True)
        except RuntimeStoreError as error:
            pytest.skip(f"the runtime cannot be fetched: {error}")
    return found


def pinned(name: str) -> Harness:
    return Harness(name=name, version=PINS[name].version)


def played(name: str, voices: Sequence[Voice], context: int = CONTEXT, **limits: int) -> Played:
    """One trial in a room of its own. Its key must be in no file that it left."""

    async def one() -> Played:
        async with stage([pinned(name)], store(name), context, **limits) as room:
            run = await room.play(name, voices)
            key = run.key.get_secret_value().encode()
            assert not [path for path in run.logs.rglob("*") if path.is_file() and key in path.read_bytes()]
            return run

    return asyncio.run(one())
