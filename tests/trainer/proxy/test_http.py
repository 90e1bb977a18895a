"""What HTTP allows and no harness does: requests in a row, in pieces, with garbage behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.trainer.proxy.conftest import Rollout, until
from tests.trainer.scripted import say

pytestmark = pytest.mark.anyio

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(rollout: Rollout) -> AsyncIterator[Pipe]:
    host, port = rollout.url.removeprefix("http://").split("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


def post(rollout: Rollout, text: str, *headers: str, key: str = "") -> bytes:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    lines = ("POST /r/r-1/v1/chat/completions HTTP/1.1", "host: x", f"x-api-key: {key or rollout.key}", f"content-length: {len(body)}")
    return "\r\n".join((*lines, *headers)).encode() + b"\r\n\r\n" + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def said(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


async def test_an_answer_has_the_head_that_http_asks_for(rollout: Rollout) -> None:
    rollout.engine.script = [say("Fine.")]
    async with connected(rollout) as (reader, writer):
        writer.write(post(rollout, "Hello."))
        status, headers, body = await answer(reader)
    assert (status, headers["content-type"], said(body)) == (200, "application/json", "Fine.")
    assert headers["date"].endswith("gmt") and "connection" not in headers


async def test_requests_that_do_not_wait_for_an_answer_are_answered_in_order(rollout: Rollout) -> None:
    """The second is taken up when the first is done, and reads its own body."""
    rollout.engine.script = [say("One."), say("Two."), say("Three.")]
    async with connected(rollout) as (reader, writer):
        writer.write(b"".join(post(rollout, text) for text in ("A", "B", "C")))
        assert [said((await answer(reader))[2]) for _ in range(3)] == ["One.", "Two.", "Three."]
    capture = await rollout.close()
    assert [turn.parent.message.content for turn in capture.graph.turns if turn.parent] == ["A", "B", "C"]


@pytest.mark.parametrize("more", [post, lambda _, text: b"GET /r/r-1/v1/models HTTP/1.1\r\nx: %b\r\n\r\n" % text.encode()])
async def test_requests_do_not_pile_up_behind_one_that_is_under_way(rollout: Rollout, more: Callable[[Rollout, str], bytes]) -> None:
    """Neither in memory nor at the engine: the connection is closed, and the call that held them up is cancelled."""
    rollout.engine.gate = asyncio.Event()
    async with connected(rollout) as (_, writer):
        writer.write(post(rollout, "Hello."))
        await until(lambda: rollout.engine.started == 1)
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"".join(more(rollout, "x" * 100) for _ in range(100)))
                await writer.drain()
        await until(lambda: rollout.engine.cancelled == 1)
    assert rollout.engine.started == 1
    assert (await rollout.close()).proxy_error is None


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_a_request_in_pieces_is_the_request(rollout: Rollout, size: int) -> None:
    rollout.engine.script = [say("Fine.")]
    raw = post(rollout, "Hello, " * 20)
    async with connected(rollout) as (reader, writer):
        for at in range(0, len(raw), size):
            writer.write(raw[at : at + size])
            await asyncio.sleep(0)
        assert said((await answer(reader))[2]) == "Fine."


async def test_a_client_that_asks_whether_to_go_on_is_told_to(rollout: Rollout) -> None:
    rollout.engine.script = [say("Fine.")]
    head, _, body = post(rollout, "Hello.", "expect: 100-continue").partition(b"\r\n\r\n")
    async with connected(rollout) as (reader, writer):
        writer.write(head + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(body)
        assert said((await answer(reader))[2]) == "Fine."


async def test_a_connection_that_is_to_be_closed_is_closed_behind_the_answer(rollout: Rollout) -> None:
    rollout.engine.script = [say("Fine.")]
    async with connected(rollout) as (reader, writer):
        writer.write(post(rollout, "Hello.", "connection: close"))
        _, headers, body = await answer(reader)
        assert (headers["connection"], said(body), await reader.read()) == ("close", "Fine.", b"")


@pytest.mark.parametrize("garbage", [b"garbage", b"\x00\x00\r\n\r\n", b"GET\r\n\r\n", b"x" * 70_000])
@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
async def test_garbage_behind_a_request_harms_nobody(rollout: Rollout, garbage: bytes, header: str) -> None:
    """The client gets the answer, or is told that this is no HTTP, and the rollout goes on."""
    rollout.engine.script = [say("Fine."), say("Fine."), say("Again.")]
    async with connected(rollout) as (reader, writer):
        writer.write(post(rollout, "Hello.", header) + garbage)
        first = await reader.read()
    assert first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
    async with connected(rollout) as (reader, writer):
        writer.write(post(rollout, "Goodbye."))
        assert (await answer(reader))[0] == 200
    await until(lambda: not rollout.proxy._sessions["r-1"]._flights)
    capture = await rollout.close()
    assert (capture.proxy_error, capture.engine_error) == (None, None)
    assert [turn.sent for turn in capture.graph.turns if turn.parent and turn.parent.message.content == "Hello."] in (
        [],
        [first.startswith(b"HTTP/1.1 200")],
    )
