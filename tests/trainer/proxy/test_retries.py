"""The same question again: joined, answered from the record, or sampled anew. Numbers are those of the field notes on user pain."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from server.schemas.capture import Exclusion
from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout, until
from tests.trainer.scripted import call, say
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello."}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 400, "messages": HELLO} | more


async def post(rollout: Rollout, **more: Any) -> Any:
    headers = {"x-api-key": rollout.key, "x-stainless-retry-count": "0"}
    return await rollout.http.post(f"{rollout.url}/v1/messages", json=body(**more), headers=headers)


async def leave_after(rollout: Rollout, text: str, until: asyncio.Event | None = None) -> None:
    """Begin to read an answer, and hang up when `text` was seen (and not before `until`)."""
    headers = {"x-api-key": rollout.key}
    async with rollout.http.stream("POST", f"{rollout.url}/v1/messages", json=body(stream=True), headers=headers) as answer:
        parts = answer.aiter_text()  # dropping the iterator would close the connection
        while text not in await anext(parts):
            pass
        if until is not None:
            await until.wait()


async def test_client_that_leaves_in_mid_stream_takes_the_call_with_it(rollout: Rollout) -> None:
    """25: nobody decodes for a client that is gone, and what it saw is not trained."""
    rollout.engine.script = [["I begin ", "to answer", asyncio.Event()], call("bash", command="ls"), say("Done.")]
    await leave_after(rollout, "begin")
    await until(lambda: rollout.engine.cancelled == 1)
    again = (await post(rollout)).json()
    use = again["content"][0]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "a"}]}
    await post(rollout, messages=[*HELLO, {"role": "assistant", "content": again["content"]}, result])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert (capture.policy_turns, capture.cancelled) == (2, 1)
    assert capture.cancelled_tokens == sum(len(rollout.engine.tokenizer.encode(text).ids) for text in ("I begin ", "to answer"))
    (sample,) = capture.samples()
    assert sample.tokens[sample.mask].tolist() == [token for call in rollout.engine.calls for token in call.sampled]


async def test_retry_joins_whatever_the_retry_header_says_and_gets_all_of_the_stream(rollout: Rollout) -> None:
    """23, 24: Claude Code's own retries carry retry count 0, and fall back to a request that does not stream."""
    gate = asyncio.Event()
    rollout.engine.script = [["First. ", "x", gate, "Second.<|im_end|>"]]
    first = asyncio.create_task(post(rollout, stream=True))
    await until(lambda: rollout.engine.started == 1)
    late = [asyncio.create_task(post(rollout, stream=stream)) for stream in (True, False)]
    (flight,) = rollout.proxy._sessions["r-1"]._flights.values()
    await until(lambda: flight.waiters == 3)
    gate.set()
    texts = [answer.text for answer in await asyncio.gather(first, *late)]
    assert rollout.engine.started == 1 and (await rollout.close()).policy_turns == 1
    assert all("First." in text and "Second." in text for text in texts)
    ids = {text.split('"id":')[1].split('"')[1] for text in texts}
    assert len(ids) == 3, "Claude Code takes two answers of one id for one"


async def test_the_first_client_may_leave_a_stream_that_another_one_reads(rollout: Rollout) -> None:
    gate, joined = asyncio.Event(), asyncio.Event()
    rollout.engine.script = [["First. ", "x", gate, "Second.<|im_end|>"]]
    first = asyncio.create_task(leave_after(rollout, "First.", joined))
    await until(lambda: rollout.engine.started == 1)
    second = asyncio.create_task(post(rollout, stream=True))
    (flight,) = rollout.proxy._sessions["r-1"]._flights.values()
    await until(lambda: flight.waiters == 2)
    joined.set()
    await first
    await until(lambda: flight.waiters == 1)
    gate.set()
    assert "Second." in (await second).text
    assert rollout.engine.cancelled == 0 and (await rollout.close()).graph.turns[0].sent


async def test_undelivered_answer_is_replayed_without_the_engine(rollout: Rollout) -> None:
    """24: the fallback that does not stream gets the very sample that was cut, with its tool-call ids."""
    rollout.engine.script = [call("bash", command="ls")]
    cut = await post(rollout, stream=True)
    (turn,) = rollout.proxy._sessions["r-1"].capture.graph.turns
    turn.sent = False  # as after a connection that broke between sampling and writing
    again = (await post(rollout)).json()
    assert again["content"][0]["id"] in cut.text and rollout.engine.started == 1
    assert turn.sent


async def test_the_longer_retry_of_a_truncated_turn_is_a_new_sample(rollout: Rollout) -> None:
    """qwen-code discards a turn that ended by length and asks again with a larger `max_tokens`: the one that comes back is real."""
    rollout.engine.script = [say("word " * 30), say("The whole answer."), say("Done.")]
    short = (await post(rollout, max_tokens=5)).json()
    whole = (await post(rollout, max_tokens=300)).json()
    assert (short["stop_reason"], whole["stop_reason"]) == ("max_tokens", "end_turn")
    await post(rollout, messages=[*HELLO, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": "Go on."}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    excluded = {len(sample.tokens): sample.excluded for sample in capture.samples()}
    assert sorted(map(str, excluded.values())) == sorted(map(str, [None, Exclusion.UNDELIVERED]))
    lost = next(sample for sample in capture.samples() if sample.excluded)
    assert lost.tokens[lost.mask].tolist() == rollout.engine.calls[0].sampled


async def test_a_truncated_turn_that_is_kept_goes_on_in_its_branch(rollout: Rollout) -> None:
    """31: Claude Code appends "Output token limit hit. Resume directly"."""
    rollout.engine.script = [say("word " * 30), say("and the rest.")]
    short = (await post(rollout, max_tokens=5)).json()
    resume = {"role": "user", "content": "Output token limit hit. Resume directly."}
    await post(rollout, messages=[*HELLO, {"role": "assistant", "content": short["content"]}, resume])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert sample.excluded is None and capture.record("t").turns[0].finish == "length"


async def test_dropped_turn_and_its_sibling_are_both_counted(rollout: Rollout) -> None:
    """13: the same prompt after a delivered answer is a sibling, not a retry."""
    rollout.engine.script = [call("bash", command="bad"), call("bash", command="good"), say("Done.")]
    await post(rollout)
    good = (await post(rollout)).json()
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": good["content"][0]["id"], "content": "a"}]}
    await post(rollout, messages=[*HELLO, {"role": "assistant", "content": good["content"]}, result])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert capture.policy_turns == 3 and len(capture.samples()) == 2


async def test_a_branch_that_departs_keeps_its_own_log_probs(rollout: Rollout) -> None:
    """44: nothing is ever recomputed by the engine: log-probs are those of the sampling, also of a turn that was left behind."""
    rollout.engine.script = [say("One."), say("Two."), say("Three.")]
    one = (await post(rollout)).json()
    back = [*HELLO, {"role": "assistant", "content": one["content"]}, {"role": "user", "content": "Go on."}]
    await post(rollout, messages=back)
    await post(rollout, messages=[{"role": "user", "content": "A summary of all that."}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert rollout.engine.started == 3


async def test_a_slow_reader_holds_nobody_up_and_may_ask_again(rollout: Rollout) -> None:
    """What a client does not read stays in its own connection; when it gives up, its retry gets the stored answer."""
    url = await rollout.proxy.open("slow", "k", Sampling(1.0, 1_000_000, ()), Limits(9, 2_000_000), "test")
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    assert rollout.proxy._server is not None
    for listener in rollout.proxy._server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    rollout.engine.script = [["word " * 2_000] * 50, say("Quick.")]
    sent = json.dumps(body(max_tokens=1_000_000, stream=True)).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"POST /r/slow/v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: k\r\ncontent-length: {len(sent)}\r\n\r\n".encode() + sent)
        turns = rollout.proxy._sessions["slow"].capture.graph.turns
        await until(lambda: len(turns) == 1)
        assert (await post(rollout)).json()["content"][0]["text"] == "Quick."
        assert not turns[0].sent
    again = await rollout.http.post(f"{url}/v1/messages", json=body(max_tokens=1_000_000), headers={"x-api-key": "k"})
    assert again.json()["content"][0]["text"] == ("word " * 100_000).strip()
    assert turns[0].sent and rollout.engine.started == 2
