"""Requests that no harness sends: each gets an error that a client of its dialect can read, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from typing import Any, get_args

import anthropic
import httpx
import openai
import pytest

from server.schemas.runspec import Family, History
from tests.trainer.proxy.conftest import Rollout, until
from tests.trainer.scripted import call, say
from trainer.engine.base import Sampling
from trainer.proxy.dialects.fields import load
from trainer.proxy.limits import MAX_HEAD, Limits, Patience
from trainer.proxy.refusal import Refusal
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import ENDPOINTS
from trainer.vocabulary import VISION, byte_level

pytestmark = pytest.mark.anyio

PATHS = ("messages", "messages/count_tokens", "chat/completions", "responses")
JUNK: list[Any] = [
    None, True, 0, -1, 1e308, 9**99, "", "x", "\ud800", "\x00", [], [[]], {}, {"a": {}},
    {"type": "text"}, {"role": "user"}, {"type": None}, "9" * 9999, "[" * 9999, '{"\\ud800": "\\ud800"}',
]  # fmt: skip


def good(path: str) -> dict[str, Any]:
    """A body with one of everything."""
    if path == "responses":
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ]
        tools = [{"type": "function", "name": "bash", "parameters": {"type": "object"}}]
        return {"model": "m", "input": items, "tools": tools, "instructions": "Be brief.", "max_output_tokens": 50, "stream": False}
    if path == "chat/completions":
        one = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "assistant", "content": None, "tool_calls": [one]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ]
        tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
        return {"model": "m", "messages": messages, "tools": tools, "max_tokens": 50, "stream_options": {}, "stream": False}
    use = {"type": "tool_use", "id": "c1", "name": "bash", "input": {}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}]},
    ]
    tools = [{"name": "bash", "input_schema": {"type": "object"}}]
    return {"model": "m", "messages": messages, "tools": tools, "max_tokens": 50, "system": "Be brief.", "stream": False}


def spoil(value: Any, rng: random.Random) -> Any:
    """Put junk somewhere into a JSON value, or take something away."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: spoil(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], spoil(value[at], rng), *value[at + 1 :]]
    return rng.choice(JUNK)


def malformed(path: str, rng: random.Random) -> bytes:
    body = json.dumps(good(path)).encode()
    match rng.randrange(6):
        case 0:
            return body[: rng.randrange(len(body) - 1)]
        case 1:
            at = rng.randrange(len(body))
            return body[:at] + bytes(rng.randrange(128, 256) for _ in range(3)) + body[at:]
        case 2:
            deep = rng.choice([b"[", b'{"a":', b'[{"content":'])
            return b'{"model":"m","messages":' + deep * rng.randrange(65, 5000)
        case 3:
            return body.replace(b"50", b"1" + b"0" * rng.randrange(5000, 20_000))
        case _:
            return json.dumps(spoil(good(path), rng)).encode()


def check(path: str, answer: httpx.Response) -> None:
    """Well-formed in the words of its dialect: the official client makes its own error class of it."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert body["error"]["message"] and body["error"]["type"]
    assert (body.get("type") == "error") == path.startswith("messages")


@pytest.fixture
def patience() -> Patience:
    return Patience(body=0.2)


async def test_a_thousand_malformed_requests_harm_nobody(rollout: Rollout) -> None:
    """Two honest rollouts go on meanwhile, and the memory that was taken is given back."""
    rng = random.Random(7)
    rollout.engine.write = lambda: say("Fine.")

    async def attack(url: str, number: int) -> int:
        refused = 0
        for _ in range(number):
            path = rng.choice(PATHS)
            answer = await rollout.http.post(f"{url}/v1/{path}", content=malformed(path, rng), headers={"x-api-key": "k"})
            assert answer.status_code in (200, 400), answer.text  # some junk is harmless: a model's name, an unknown field
            if answer.status_code == 400:
                check(path, answer)
                refused += 1
        return refused

    async def attacked(name: str, number: int) -> int:
        url = await rollout.proxy.open(name, "k", Sampling(1.0, 500, ()), Limits(10_000, 20_000), "test")
        refused = sum(await asyncio.gather(*(attack(url, number // 8) for _ in range(8))))
        capture = await rollout.proxy.close(name)
        assert capture.proxy_error is None and capture.engine_error is None
        rollout.engine.calls.clear()
        return refused

    # What is learned once, such as the names of unknown fields, and what the clients import when they are used.
    await asyncio.gather(attacked("first", 200), converse(rollout, "c"))
    gc.collect()
    before = sys.getallocatedblocks()
    refused, *_ = await asyncio.gather(attacked("second", 1_000), converse(rollout, "a"), converse(rollout, "b"))
    rollout.engine.calls.clear()
    gc.collect()
    assert refused > 500
    assert sys.getallocatedblocks() - before < 5_000


@pytest.mark.parametrize("history", History)
@pytest.mark.parametrize("family", get_args(Family))
def test_what_a_dialect_accepts_a_renderer_can_write(family: Family, history: History) -> None:
    rendering, rng = Rendering(byte_level(control=VISION), family=family, history=history), random.Random(3)
    accepted = 0
    for _ in range(400):
        path = rng.choice(PATHS)
        body = spoil(spoil(good(path), rng), rng)
        try:
            request = ENDPOINTS[f"v1/{path}"].dialect.parse(load(json.dumps(body).encode()), {})
        except Refusal:
            continue
        rendering.render(request.messages, request.tools)
        accepted += 1
    assert accepted > 50


async def converse(rollout: Rollout, name: str) -> None:
    """Ten turns of a harness in a rollout of its own."""
    url = await rollout.proxy.open(name, "k", Sampling(1.0, 500, ()), Limits(20, 20_000), "test")
    client = rollout.openai.with_options(base_url=f"{url}/v1", api_key="k")
    messages: list[Any] = [{"role": "user", "content": "Hello."}]
    for _ in range(10):
        answer = await client.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].message.content == "Fine."
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
        await asyncio.sleep(0.01)
    capture = await rollout.proxy.close(name)
    assert capture.policy_turns == 10 and len(capture.samples()) == 1


async def test_errors_are_those_of_the_official_clients(rollout: Rollout) -> None:
    with pytest.raises(openai.BadRequestError, match="messages"):
        await rollout.openai.chat.completions.create(model="m", messages=[])
    with pytest.raises(openai.BadRequestError, match="input"):
        await rollout.openai.responses.create(model="m", input=[])
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await rollout.anthropic.messages.create(model="m", max_tokens=1, messages=[])


async def raw(rollout: Rollout, *parts: bytes, read: bool = True) -> bytes:
    """Bytes on a socket of their own; what comes back until the server closes.

    A part is written in the round of the loop in which the server may read the one before, so that no limit can pass between two parts:
    behind it the server has closed, and a write would reset the connection instead of reading the answer.
    """
    host, port = rollout.url.removeprefix("http://").split("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            return await reader.read() if read else b""
    finally:
        writer.close()


def head(rollout: Rollout, path: str, *headers: str) -> bytes:
    lines = (f"POST /r/r-1/v1/{path} HTTP/1.1", "host: x", f"x-api-key: {rollout.key}", "connection: close", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_come_slowly_or_not_at_all(rollout: Rollout, path: str) -> None:
    slow = await raw(rollout, head(rollout, path, "content-length: 900"), b'{"model"', b': "m"')
    status, _, body = slow.partition(b"\r\n\r\n")
    assert b" 408 " in status.split(b"\r\n")[0] and json.loads(body)["error"]["message"].startswith("the body did not arrive")
    await raw(rollout, head(rollout, path, "content-length: 900"), b"{", read=False)
    short = await raw(rollout, head(rollout, path, "content-length: 5"), json.dumps(good(path)).encode())
    assert b" 400 " in short.split(b"\r\n")[0]
    assert rollout.engine.started == 0


HEADS = {
    "huge header": [b"POST /r/r-1/v1/messages HTTP/1.1\r\nx: " + b"a" * (2 * MAX_HEAD)],
    "many headers": [b"POST /r/r-1/v1/messages HTTP/1.1\r\n" + b"x: a\r\n" * MAX_HEAD],
    "huge path": [b"POST /" + b"a" * (2 * MAX_HEAD)],
    "no http": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 30],
    "two lengths": [b"POST /r/r-1/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n"],
    "negative length": [b"POST /r/r-1/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n"],
    "broken chunk": [b"POST /r/r-1/v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
}


@pytest.mark.parametrize("parts", HEADS.values(), ids=HEADS)
async def test_what_is_no_http_is_said_to_be_none(rollout: Rollout, parts: list[bytes]) -> None:
    answer = await raw(rollout, *parts)
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
    assert json.loads(body[: body.rindex(b"}") + 1])["error"]["message"]
    rollout.engine.script = [say("Fine.")]
    hello: Any = [{"role": "user", "content": "Hello."}]
    assert (await rollout.openai.chat.completions.create(model="m", messages=hello)).choices[0].message.content == "Fine."


@pytest.mark.parametrize("patience", [Patience(head=0.05)])
async def test_connections_that_say_nothing_are_closed(rollout: Rollout, patience: Patience) -> None:
    assert await raw(rollout) == b""
    assert await raw(rollout, b"POST /r/r-1/v1/messages HTTP/1.1\r\nhost: x\r\n") == b""
    rollout.engine.script, rollout.engine.gate = [say("Fine.")], asyncio.Event()
    hello = b'{"max_tokens":50,"messages":[{"role":"user","content":"Hello."}]}'
    asking = asyncio.create_task(raw(rollout, head(rollout, "messages", f"content-length: {len(hello)}"), hello))
    await asyncio.sleep(0.2)  # a request that is being answered is not meant
    rollout.engine.gate.set()
    assert b"Fine." in await asking


async def test_huge_tool_call_ids_and_unknown_ones_are_text(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", command="ls"), say("Fine.")]
    body = good("messages")
    body["messages"][1]["content"][0]["id"] = body["messages"][2]["content"][0]["tool_use_id"] = "t" * 1_000_000
    answer = await rollout.http.post(f"{rollout.url}/v1/messages", json=body, headers={"x-api-key": rollout.key})
    assert answer.status_code == 200
    assert max(len(node.ids) for node in rollout.proxy._sessions["r-1"].capture.graph.nodes()) < 1000


async def test_too_many_calls_at_once_are_told_to_come_later(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.proxy.session.MAX_CALLS", 3)
    rollout.engine.gate, rollout.engine.write = asyncio.Event(), lambda: say("Fine.")

    async def ask(i: int) -> int:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": str(i)}]}
        return (await rollout.http.post(f"{rollout.url}/v1/messages", json=body, headers={"x-api-key": rollout.key})).status_code

    asking = [asyncio.create_task(ask(i)) for i in range(5)]
    await until(lambda: sum(task.done() for task in asking) == 2)
    rollout.engine.gate.set()
    assert sorted(await asyncio.gather(*asking)) == [200, 200, 200, 429, 429]
    assert rollout.engine.started == 3
