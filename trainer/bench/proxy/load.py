"""The load: bare HTTP connections, sent to on a fixed schedule (open loop) or as fast as answers come (closed loop)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from trainer.bench.proxy.traffic import TURNS, Conversation

LIMIT = 1 << 24
Converse = Callable[[str], Conversation]


class Usage(NamedTuple):
    """Of a process since it started."""

    cpu_s: float
    rss_mb: float


class Target(Protocol):
    """A server under test."""

    async def open(self, session: str) -> str:
        """Admit a rollout; the URL to post its calls to."""
        ...

    async def close(self, session: str) -> None: ...

    async def usage(self) -> Usage: ...


@dataclass
class Latencies:
    """Seconds from the scheduled time of a call to the last byte of its answer, so that waiting behind a slow one counts."""

    through: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)


class Connection:
    """One kept connection to one URL."""

    def __init__(self, url: str, key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(url)
        self._reader, self.writer = reader, writer
        lines = (f"POST {parts.path} HTTP/1.1", f"host: {parts.netloc}", f"authorization: Bearer {key}", "content-type: application/json")
        self._head = "\r\n".join(lines).encode()

    async def post(self, body: bytes) -> bytes:
        """Raises RuntimeError for any status but 200."""
        self.writer.write(self._head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length:" in head:
            answer = await self._reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        else:
            answer = await self._chunks()
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"{head.split(b'\r\n')[0].decode()}: {answer[:300].decode(errors='replace')}")
        return answer

    async def _chunks(self) -> bytes:
        answer = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            answer += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return answer


@asynccontextmanager
async def connect(url: str, key: str) -> AsyncIterator[Connection]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=LIMIT)
    try:
        yield Connection(url, key, reader, writer)
    finally:
        writer.close()


async def open_loop(
    target: Target, converse: Converse, key: str, sessions: int, rate: float, seconds: float, direct: Callable[[], Awaitable[object]]
) -> Latencies:
    """`rate` calls a second in all, in turn over the sessions. Half-way between two of them the engine is called directly."""
    found, start, count = Latencies(), time.perf_counter() + 0.5, int(rate * seconds)

    async def session(index: int) -> None:
        slots = iter(range(index, count, sessions))
        generation = 0
        while chunk := list(itertools.islice(slots, TURNS)):
            async with _rollout(target, converse, key, f"o{sessions}-{index}-{generation}") as (connection, conversation):
                for slot in chunk:
                    body, due = conversation.body(), start + slot / rate
                    await asyncio.sleep(due - time.perf_counter())
                    answer = await connection.post(body)
                    found.through.append(time.perf_counter() - due)
                    conversation.take(answer)
            generation += 1

    async def directly() -> None:
        for slot in range(count):
            due = start + (slot + 0.5) / rate
            await asyncio.sleep(due - time.perf_counter())
            await direct()
            found.direct.append(time.perf_counter() - due)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(directly())
        for index in range(sessions):
            tasks.create_task(session(index))
    return found


async def closed_loop(target: Target, converse: Converse, key: str, sessions: int, seconds: float) -> int:
    """Every session asks again as soon as it has its answer; the number of answers."""
    end, answers = time.perf_counter() + seconds, 0

    async def session(index: int) -> None:
        nonlocal answers
        generation = 0
        while time.perf_counter() < end:
            async with _rollout(target, converse, key, f"c{sessions}-{index}-{generation}") as (connection, conversation):
                while conversation.turns < TURNS and time.perf_counter() < end:
                    conversation.take(await connection.post(conversation.body()))
                    answers += 1
            generation += 1

    async with asyncio.TaskGroup() as tasks:
        for index in range(sessions):
            tasks.create_task(session(index))
    return answers


@asynccontextmanager
async def _rollout(target: Target, converse: Converse, key: str, name: str) -> AsyncIterator[tuple[Connection, Conversation]]:
    async with connect(await target.open(name), key) as connection:
        yield connection, converse(name)
    await target.close(name)
