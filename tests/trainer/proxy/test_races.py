"""Closing while things happen: every client gets an end, every engine call stops, and the capture is complete."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout, until
from tests.trainer.scripted import ScriptedEngine, say
from trainer.engine.base import EngineUnavailable, Sampling
from trainer.proxy.limits import Limits, Patience
from trainer.proxy.line import ClientGone, Line
from trainer.proxy.service import Proxy

pytestmark = pytest.mark.anyio

SAMPLING = Sampling(1.0, 500, ())


def body(text: str = "Hello.", stream: bool = True) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": text}], "stream": stream}


async def read(
    http: httpx.AsyncClient, url: str, key: str, text: str = "Hello.", stream: bool = True, seen: asyncio.Event | None = None
) -> tuple[int, str]:
    """Status and everything that came before the end of the answer. `seen` is set when some text has come."""
    parts: list[str] = []
    async with http.stream("POST", f"{url}/v1/messages", json=body(text, stream), headers={"x-api-key": key}, timeout=60) as answer:
        async for part in answer.aiter_text():
            parts.append(part)
            if seen is not None and "text." in part:
                seen.set()
        return answer.status_code, "".join(parts)


async def test_close_ends_a_stream_that_has_shown_text(rollout: Rollout) -> None:
    rollout.engine.script = [["Some text. ", "x", asyncio.Event()]]
    seen = asyncio.Event()
    reading = asyncio.create_task(read(rollout.http, rollout.url, rollout.key, seen=seen))
    async with asyncio.timeout(60):
        await seen.wait()
    capture = await rollout.close()
    status, text = await reading
    assert status == 200 and "Some text." in text and "event: error" not in text and "message_stop" not in text
    assert (rollout.engine.cancelled, capture.cancelled, capture.policy_turns, capture.engine_error) == (1, 1, 0, None)


@pytest.mark.parametrize("patience", [Patience(backoff=1000, longest_backoff=1000)])
async def test_close_while_the_engine_is_being_tried_again(rollout: Rollout, patience: Patience) -> None:
    rollout.engine.script = [EngineUnavailable("no free replica"), say("never")]
    reading = asyncio.create_task(read(rollout.http, rollout.url, rollout.key))
    await until(lambda: rollout.proxy._upstream.resumed == 1)
    capture = await rollout.close()
    status, text = await reading
    assert status == 404 and "closed" in text
    assert (rollout.engine.started, capture.cancelled, capture.engine_error) == (1, 1, None)


@pytest.mark.parametrize("stream", [True, False])
async def test_close_and_a_retry_at_the_same_moment(rollout: Rollout, stream: bool) -> None:
    rollout.engine.gate, rollout.engine.write = asyncio.Event(), lambda: say("Fine.")
    asking = [asyncio.create_task(read(rollout.http, rollout.url, rollout.key, stream=stream)) for _ in range(5)]
    await until(lambda: rollout.engine.started == 1)
    closing = asyncio.create_task(rollout.close())
    asking += [asyncio.create_task(read(rollout.http, rollout.url, rollout.key, stream=stream)) for _ in range(5)]
    rollout.engine.gate.set()
    capture = await closing
    assert {status for status, _ in await asyncio.gather(*asking)} == {404}
    assert capture.policy_turns == 0 and rollout.engine.started == 1


async def test_sixty_four_clients_at_once_and_half_of_them_closed(engine: ScriptedEngine, proxy: Proxy) -> None:
    """Each in its own rollout; every other one is closed, or its client leaves, while its stream is open."""
    gate = asyncio.Event()
    engine.write = lambda: "Fine.<|im_end|>"
    engine.gate = gate
    urls = [await proxy.open(f"r-{i}", f"key-{i}", SAMPLING, Limits(20, 20_000), "test") for i in range(64)]
    async with httpx.AsyncClient(verify=False, timeout=60, limits=httpx.Limits(max_connections=100)) as http:  # noqa: S501 plain HTTP
        asking = [asyncio.create_task(read(http, url, f"key-{i}", str(i), stream=i % 3 > 0)) for i, url in enumerate(urls)]
        await until(lambda: engine.started == 64)
        closed = await asyncio.gather(*(proxy.close(f"r-{i}") for i in range(0, 64, 4)))
        for i in range(1, 64, 4):
            asking[i].cancel()
        await until(lambda: engine.cancelled == 32)
        gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
    assert all(capture.cancelled == 1 and capture.policy_turns == 0 for capture in closed)
    for i, answer in enumerate(answers):
        if i % 4 == 1:
            assert isinstance(answer, asyncio.CancelledError)
        else:
            assert isinstance(answer, tuple) and answer[0] == (404 if i % 4 == 0 else 200)
    for i in range(64):
        if i % 4:
            capture = await proxy.close(f"r-{i}")
            audit(capture, engine, f"r-{i}")
            assert (capture.policy_turns, capture.cancelled) == ((1, 0) if i % 4 > 1 else (0, 1))


async def test_stop_ends_what_is_open(rollout: Rollout) -> None:
    rollout.engine.script = [["Some text. ", "x", asyncio.Event()]]
    reading = asyncio.create_task(read(rollout.http, rollout.url, rollout.key))
    await until(lambda: rollout.engine.started == 1)
    await rollout.proxy.stop()
    with pytest.raises((httpx.ConnectError, httpx.RemoteProtocolError)):
        await rollout.http.get(f"{rollout.url}/v1/models")
    assert "message_stop" not in (await reading)[1]
    assert rollout.engine.cancelled == 1


async def test_a_client_that_takes_nothing_any_more_is_gone() -> None:
    """Its turn was never sent; nothing is buffered for it beyond what its connection holds."""

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    line = Line(SimpleNamespace(gone=asyncio.Future(), flow=SimpleNamespace(write_paused=True)), send, patience=0.01)
    await line.begin()
    with pytest.raises(ClientGone):
        await line.events("text", more=True)


async def test_a_client_that_left_before_the_last_write_has_not_got_the_answer() -> None:
    async def send(message: Any) -> None:
        return

    gone = asyncio.Future[None]()
    line = Line(SimpleNamespace(gone=gone, flow=SimpleNamespace(write_paused=False)), send, patience=1)
    gone.set_result(None)
    with pytest.raises(ClientGone):
        await line.answer(200, "{}")
