from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from server.schemas.capture import BranchReason, Exclusion
from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout, until
from tests.trainer.scripted import ScriptedEngine, call, say
from trainer.engine.base import EngineError, Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.service import Proxy

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello."}]
SAMPLING = Sampling(1.0, 100, ())


async def say_hello(rollout: Rollout, messages: Any = None, **more: Any) -> Any:
    answer = await rollout.openai.chat.completions.create(model="m", messages=messages or HELLO, **more)
    return answer.choices[0].message if not more.get("stream") else answer


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "nope"}, {"authorization": "Bearer nope"}, {"authorization": "Bearer"}])
async def test_without_the_key_nothing_is_learned(rollout: Rollout, headers: dict[str, str]) -> None:
    for path in ("chat/completions", "messages", "messages/count_tokens"):
        answer = await rollout.http.post(f"{rollout.url}/v1/{path}", content=b"{}", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert rollout.key not in answer.text
    assert (await rollout.http.head(rollout.url)).status_code == 200
    assert (await rollout.http.head(f"{rollout.url}/")).status_code == 200
    models = await rollout.http.get(f"{rollout.url}/v1/models")
    assert (models.status_code, models.json()["data"]) == (200, [])
    assert rollout.engine.started == 0


async def test_key_of_another_rollout_is_wrong(rollout: Rollout) -> None:
    url = await rollout.proxy.open("r-2", "other-key", SAMPLING, Limits(3, 1000), "test")
    client = rollout.openai.with_options(base_url=f"{url}/v1")
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(model="m", messages=HELLO)


async def test_closed_and_unknown_rollouts(rollout: Rollout) -> None:
    capture = await rollout.close()
    assert await rollout.close() is capture
    with pytest.raises(openai.NotFoundError, match="closed"):
        await say_hello(rollout)
    with pytest.raises(anthropic.NotFoundError, match="closed"):
        await rollout.anthropic.messages.create(model="m", max_tokens=5, messages=HELLO)
    with pytest.raises(openai.AuthenticationError, match="no such rollout"):
        await say_hello(Rollout(**{**vars(rollout), "openai": rollout.openai.with_options(base_url=f"{rollout.url}x/v1")}))
    with pytest.raises(ValueError, match="opened before"):
        await rollout.proxy.open("r-1", "k", SAMPLING, Limits(3, 1000), "test")
    with pytest.raises(KeyError):
        await rollout.proxy.close("never")


async def test_same_request_joins_the_call_in_flight(rollout: Rollout) -> None:
    rollout.engine.script, rollout.engine.gate = [say("One.")], asyncio.Event()
    waiting = [asyncio.create_task(say_hello(rollout)) for _ in range(3)]
    await until(lambda: rollout.engine.started == 1)
    (flight,) = rollout.proxy._sessions["r-1"]._flights.values()
    await until(lambda: flight.waiters == 3)
    rollout.engine.gate.set()
    assert {message.content for message in await asyncio.gather(*waiting)} == {"One."}
    assert rollout.engine.started == 1
    assert (await rollout.close()).policy_turns == 1


async def test_parallel_sub_agents_with_one_body_are_no_retries(rollout: Rollout) -> None:
    rollout.engine.script = [say("One."), say("Two.")]
    texts = await asyncio.gather(*(say_hello(rollout, extra_headers={"x-session-id": name}) for name in "ab"))
    assert {message.content for message in texts} == {"One.", "Two."}
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [sample.excluded for sample in capture.samples()] == [None, None]


async def test_client_that_hangs_up_cancels_the_engine(rollout: Rollout) -> None:
    rollout.engine.gate = asyncio.Event()
    leaves = asyncio.create_task(say_hello(rollout))
    await until(lambda: rollout.engine.started == 1)
    leaves.cancel()
    await until(lambda: rollout.engine.cancelled == 1)
    rollout.engine.gate.set()
    rollout.engine.script = [say("Again.")]
    assert (await say_hello(rollout)).content == "Again."
    capture = await rollout.close()
    assert (capture.policy_turns, capture.cancelled) == (1, 1)


@pytest.mark.parametrize("max_turns", [1])
async def test_a_turn_cap_that_did_not_end_the_harness_is_forgotten(rollout: Rollout) -> None:
    rollout.engine.script, rollout.engine.gate = [say("One.")], asyncio.Event()
    given_up = asyncio.create_task(say_hello(rollout))
    await until(lambda: rollout.engine.started == 1)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await say_hello(rollout, [{"role": "user", "content": "At the same time."}])
    given_up.cancel()
    await until(lambda: rollout.engine.cancelled == 1)
    rollout.engine.gate.set()
    await say_hello(rollout, [{"role": "user", "content": "Once more."}])
    capture = await rollout.close()
    assert (capture.policy_turns, capture.turn_cap_hit) == (1, False)


async def test_one_of_two_waiters_may_leave(rollout: Rollout) -> None:
    rollout.engine.script, rollout.engine.gate = [say("One.")], asyncio.Event()
    stays = asyncio.create_task(say_hello(rollout))
    await until(lambda: rollout.engine.started == 1)
    (flight,) = rollout.proxy._sessions["r-1"]._flights.values()
    leaves = asyncio.create_task(say_hello(rollout))
    await until(lambda: flight.waiters == 2)
    leaves.cancel()
    await until(lambda: flight.waiters == 1)
    rollout.engine.gate.set()
    assert (await stays).content == "One."
    assert rollout.engine.cancelled == 0


async def test_answer_that_never_got_out_is_given_again(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", command="ls"), say("Done.")]
    first = await say_hello(rollout)
    turn = rollout.proxy._sessions["r-1"].capture.graph.turns[0]
    turn.sent = False  # as after a connection that broke between sampling and writing
    stream = await say_hello(rollout, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert [part.id for delta in deltas for part in delta.tool_calls or []] == [first.tool_calls[0].id]
    assert rollout.engine.started == 1
    assert turn.sent


async def test_of_two_samples_the_one_that_comes_back_is_trained(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", command="one"), call("bash", command="two"), say("Done.")]
    first, second = await say_hello(rollout), await say_hello(rollout)
    back = [*HELLO, first.model_dump(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "ok"}]
    await say_hello(rollout, back)
    capture = await rollout.close()
    audit(capture, rollout.engine)
    kept, lost = capture.samples()
    assert (kept.reason, kept.excluded) == (BranchReason.ROOT, None)
    assert (lost.reason, lost.excluded) == (BranchReason.RETRY, Exclusion.UNDELIVERED)
    assert lost.tokens[lost.mask].tolist() == rollout.engine.calls[1].sampled
    assert second.tool_calls[0].id != first.tool_calls[0].id
    assert [turn.delivered for turn in capture.record("t").turns] == [True, False, True]


async def test_of_two_samples_that_never_come_back_the_newer_is_trained(rollout: Rollout) -> None:
    rollout.engine.script = [say("One."), say("Two.")]
    await say_hello(rollout)
    await say_hello(rollout)
    first, second = (await rollout.close()).samples()
    assert (first.excluded, second.excluded) == (Exclusion.UNDELIVERED, None)


async def test_delivered_turns_before_an_undelivered_one_are_trained(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", command="ls"), say("Never seen.")]
    first = await say_hello(rollout)
    await say_hello(rollout, [*HELLO, first.model_dump(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a"}])
    rollout.proxy._sessions["r-1"].capture.graph.turns[1].sent = False
    capture = await rollout.close()
    audit(capture, rollout.engine)
    trained, lost = capture.samples()
    assert trained.tokens[trained.mask].tolist() == rollout.engine.calls[0].sampled
    assert lost.tokens[lost.mask].tolist() == rollout.engine.calls[1].sampled
    assert (trained.excluded, lost.excluded) == (None, Exclusion.UNDELIVERED)


@pytest.mark.parametrize("error", [EngineError("out of memory"), RuntimeError("actor died")])
async def test_engine_error_is_a_fact_and_ends_the_harness(rollout: Rollout, error: Exception) -> None:
    rollout.engine.script = [error, say("too late")]
    for _ in range(2):
        with pytest.raises(openai.NotFoundError, match="no longer available"):
            await say_hello(rollout)
    capture = await rollout.close()
    assert capture.engine_error == f"{type(error).__name__}: {error}"
    assert capture.policy_turns == 0 and capture.samples() == []


async def test_close_ends_calls_in_flight(rollout: Rollout) -> None:
    rollout.engine.gate = asyncio.Event()
    waiting = asyncio.create_task(say_hello(rollout))
    await until(lambda: rollout.engine.started == 1)
    capture = await rollout.close()
    with pytest.raises(openai.NotFoundError, match="closed"):
        await waiting
    assert (rollout.engine.cancelled, capture.cancelled, capture.engine_error) == (1, 1, None)


async def test_routes_of_the_wrong_length_are_dropped_and_listed(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    """40, 42: rows are prompt + answer - 1, because the last token was never an input; any other number is not shifted into place."""
    generate = ScriptedEngine.generate

    async def short(self: ScriptedEngine, *args: Any) -> Any:
        generation = await generate(self, *args)
        assert generation.routes is not None
        return type(generation)(generation.token_ids, generation.log_probs, generation.routes[1:], "stop", 0)

    monkeypatch.setattr(ScriptedEngine, "generate", short)
    rollout.engine.script = [say("One.")]
    await say_hello(rollout)
    capture = await rollout.close()
    assert len(capture.violations) == 1
    (sample,) = capture.samples()
    assert not sample.routed.any()


BROKEN = [
    b"",
    b'{"messages": [',
    b"\xff\xfe",
    b"[]",
    b'"text"',
    b"{}",
    b'{"messages": {}}',
    b'{"messages": []}',
    b'{"messages": ["x"]}',
    b'{"messages": [{"role": "alien", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"messages": [{"role": "user", "content": [5]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [1]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"messages": ' + b"[" * 100_000,
    b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}",
    json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}], "content": [{"type": "tool_use"}]}]}).encode(),
]


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_malformed_bodies_get_errors_of_their_dialect(rollout: Rollout, path: str) -> None:
    for body in BROKEN:
        answer = await rollout.http.post(f"{rollout.url}/v1/{path}", content=body, headers={"x-api-key": rollout.key})
        assert answer.status_code == 400, body[:200]
        assert answer.json()["error"]["message"]
        assert (answer.json().get("type") == "error") == (path == "messages")
    rollout.engine.script = [say("Fine.")]
    assert (await say_hello(rollout)).content == "Fine."
    assert (await rollout.close()).proxy_error is None


async def test_lone_surrogates_are_text(rollout: Rollout) -> None:
    rollout.engine.script = [say("Fine."), '<tool_call>\n{"name": "bash", "arguments": {"command": "\\ud800"}}\n</tool_call><|im_end|>']
    body = b'{"messages": [{"role": "user", "content": "\\ud800 \\udc00x"}]}'
    answer = await rollout.http.post(f"{rollout.url}/v1/chat/completions", content=body, headers={"x-api-key": rollout.key})
    assert answer.status_code == 200
    assert (await say_hello(rollout)).tool_calls[0].function.arguments == '{"command": "\\ufffd"}'
    assert (await rollout.close()).record("t").model_dump_json()


async def test_body_is_bounded(rollout: Rollout) -> None:
    async def flood() -> Any:
        for _ in range(40):
            yield b" " * (1024 * 1024)

    with contextlib.suppress(httpx.WriteError):  # the server may close before it has read everything
        answer = await rollout.http.post(f"{rollout.url}/v1/messages", content=flood(), headers={"x-api-key": rollout.key})
        assert answer.status_code == 413
    assert rollout.engine.started == 0


async def test_unserved_paths_say_so(rollout: Rollout) -> None:
    answer = await rollout.http.post(f"{rollout.url}/v1/embeddings", json={}, headers={"x-api-key": rollout.key})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


async def test_port_that_is_taken_is_an_os_error(proxy: Proxy, engine: ScriptedEngine, rendering: Any) -> None:
    port = int(proxy._url.rsplit(":", 1)[1])
    with pytest.raises(OSError):
        await Proxy(engine, rendering).start("127.0.0.1", port)
