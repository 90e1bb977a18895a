"""An engine that fails, seen by a client that must not notice."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import openai
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainer.proxy.conftest import Rollout, until
from tests.trainer.scripted import ABORT, call, routes_at, say
from trainer.engine.base import EngineError, EngineUnavailable, Generation, GenerationRequest, Sampling
from trainer.proxy.limits import Patience
from trainer.proxy.upstream import Upstream

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello."}]
BUSY = EngineUnavailable("no free replica")


async def ask(rollout: Rollout) -> Message:
    """One streamed answer, put together by the official client."""
    async with rollout.anthropic.messages.stream(model="m", max_tokens=400, messages=HELLO) as stream:
        return await stream.get_final_message()


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_trouble_before_the_first_token_is_retried_unseen(rollout: Rollout) -> None:
    """harness-wire 8: opencode, qwen and codex keep, drop or duplicate turns when they see a failure."""
    rollout.engine.script = [BUSY, [BUSY], [ABORT], say("Here.")]
    assert text_of(await ask(rollout)) == "Here."
    capture = await rollout.close()
    assert (rollout.engine.started, capture.policy_turns, capture.engine_error) == (4, 1, None)


@pytest.mark.parametrize("trouble", [BUSY, ABORT])
async def test_an_interrupted_turn_goes_on_behind_its_tokens(rollout: Rollout, trouble: Any) -> None:
    """Never an error behind text: Claude Code ends its run at one, opencode keeps half a turn beside the retried one."""
    rollout.engine.script = [["I look ", "at it. ", trouble], ["And ", "there.", trouble], call("bash", command="ls")]
    message = await ask(rollout)
    assert text_of(message) == "I look at it. And there."
    assert [block.name for block in message.content if block.type == "tool_use"] == ["bash"]
    capture = await rollout.close()
    (turn,) = capture.graph.turns
    last = rollout.engine.calls[-1]
    assert np.concatenate([node.ids for node in turn.path()]).tolist() == last.prompt + last.sampled
    assert len(turn.log_probs) == len(turn.sampled) == message.usage.output_tokens
    assert turn.log_probs[-len(last.sampled) :].tolist() == np.array(last.log_probs, np.float32).tolist()


@pytest.mark.parametrize("trouble", [BUSY, ABORT])
async def test_a_turn_that_is_lost_behind_its_stop_token_is_whole(rollout: Rollout, trouble: Any) -> None:
    rollout.engine.script = [["All ", say("done."), trouble]]
    message = await ask(rollout)
    assert (text_of(message), message.stop_reason, rollout.engine.started) == ("All done.", "end_turn", 1)
    (turn,) = (await rollout.close()).graph.turns
    assert turn.sampled[-1] == rollout.engine.tokenizer.token_to_id("<|im_end|>")


async def test_routes_of_an_aborted_piece_stay_and_lost_ones_are_missing(rollout: Rollout) -> None:
    """40: a row is the one that was chosen, or it is marked as missing; never that of another pass."""
    rollout.engine.script = [["One ", ABORT], ["two ", ABORT], say("three.")]
    await ask(rollout)
    rollout.engine.script = [["One ", BUSY], say("two.")]
    await rollout.anthropic.messages.create(model="m", max_tokens=400, messages=[{"role": "user", "content": "Again."}])
    capture = await rollout.close()
    whole, broken = capture.samples()
    assert whole.routed.tolist() == [True] * (len(whole.tokens) - 1) + [False]
    assert whole.routes is not None
    np.testing.assert_array_equal(whole.routes[:-1], routes_at(whole.tokens[:-1], np.arange(len(whole.tokens) - 1)))
    assert not broken.routed[broken.prompt_len :].any() and capture.violations == []


async def test_a_turn_that_saw_new_weights_has_their_versions(rollout: Rollout) -> None:
    """39: no KV of older weights is reused, because every call is salted with the newest version."""
    gate = asyncio.Event()
    rollout.engine.script = [["Old ", ABORT], [gate, "new.<|im_end|>"]]
    asking = asyncio.create_task(ask(rollout))
    await until(lambda: rollout.engine.started == 2)
    rollout.engine.version = 3
    gate.set()
    await asking
    capture = await rollout.close()
    (sample,) = capture.samples()
    first, second = rollout.engine.calls
    assert sample.versions[sample.mask].tolist() == [0] * len(first.sampled) + [3] * len(second.sampled)


async def test_calls_are_salted_with_session_and_newest_version(rollout: Rollout) -> None:
    """39: KV of older weights is never asked for, whether the trainer said that there are new ones or an answer showed it."""
    rollout.engine.script = [say("One."), say("Two."), say("Three.")]
    for number, version in enumerate([0, 5, 6]):
        rollout.engine.version = version
        if version == 5:
            rollout.proxy.set_version(5)
        body: Any = [{"role": "user", "content": f"Question {number}."}]
        await rollout.openai.chat.completions.create(model="m", messages=body)
    rollout.engine.script = [say("Four.")]
    await rollout.openai.chat.completions.create(model="m", messages=HELLO)
    assert [call.salt for call in rollout.engine.calls] == ["r-1/0", "r-1/5", "r-1/5", "r-1/6"]


async def test_a_turn_that_was_aborted_at_its_limit_is_a_truncated_one(rollout: Rollout) -> None:
    text = "too long " * 30
    rollout.engine.script = [[text, ABORT]]
    limit = len(rollout.engine.tokenizer.encode(text).ids)
    message = await rollout.anthropic.messages.create(model="m", max_tokens=limit, messages=HELLO)
    assert message.stop_reason == "max_tokens" and rollout.engine.started == 1


async def test_trouble_that_does_not_pass_ends_the_rollout(rollout: Rollout, patience: Patience) -> None:
    rollout.engine.script = [BUSY] * patience.attempts
    with pytest.raises(openai.NotFoundError, match="no longer available"):
        await rollout.openai.chat.completions.create(model="m", messages=HELLO)
    assert (await rollout.close()).engine_error == "EngineUnavailable: no free replica"


async def test_an_engine_that_cancels_its_own_call_has_failed(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(*_: Any) -> Generation:
        raise asyncio.CancelledError

    monkeypatch.setattr(rollout.engine, "generate", cancelled)
    with pytest.raises(openai.NotFoundError, match="no longer available"):
        await rollout.openai.chat.completions.create(model="m", messages=HELLO)
    capture = await rollout.close()
    assert capture.engine_error == "CancelledError: " and capture.cancelled == 0


async def test_after_text_a_final_failure_ends_the_stream_without_an_error_event(rollout: Rollout) -> None:
    gate, got = asyncio.Event(), ""
    rollout.engine.script = [["I look ", "at it. ", gate, EngineError("the weights are gone")]]
    body = {"model": "m", "max_tokens": 400, "messages": HELLO, "stream": True}
    async with rollout.http.stream("POST", f"{rollout.url}/v1/messages", json=body, headers={"x-api-key": rollout.key}) as answer:
        async for text in answer.aiter_text():
            got += text
            gate.set()
    assert answer.status_code == 200 and '"text":"I look' in got
    assert "event: error" not in got and "message_stop" not in got
    again = await rollout.http.post(f"{rollout.url}/v1/messages", json=body, headers={"x-api-key": rollout.key})
    assert again.status_code == 404
    capture = await rollout.close()
    assert capture.engine_error == "EngineError: the weights are gone" and capture.policy_turns == 0
    assert capture.lost_tokens == len(rollout.engine.tokenizer.encode("I look at it. ").ids) and capture.cancelled_tokens == 0


@pytest.mark.parametrize("patience", [Patience(keep_alive=0.02)])
@pytest.mark.parametrize(
    ("path", "sign"),
    [
        ("messages", '"delta":{"type":"text_delta","text":""}'),
        ("chat/completions", "chat.completion.chunk"),
        ("responses", "event: response."),
    ],
)
async def test_a_silent_engine_is_bridged_by_events(rollout: Rollout, patience: Patience, path: str, sign: str) -> None:
    """harness-wire 8: Claude Code drops a stream after 300 s without a real event; pings and comments do not count."""
    gate, got = asyncio.Event(), ""
    rollout.engine.script = [[gate, "At last.<|im_end|>"]]
    body = {"model": "m", "max_tokens": 400, "messages": HELLO, "input": "Hello.", "stream": True}
    async with rollout.http.stream("POST", f"{rollout.url}/v1/{path}", json=body, headers={"x-api-key": rollout.key}) as answer:
        async for text in answer.aiter_text():
            got += text
            if got.count(sign) >= 3:
                gate.set()
    assert gate.is_set() and "At last." in got
    assert (await rollout.close()).graph.turns[0].sent


@pytest.mark.parametrize("patience", [Patience(keep_alive=0.02)])
async def test_a_failure_before_any_text_is_an_error_event_once_the_stream_has_begun(rollout: Rollout, patience: Patience) -> None:
    gate, got = asyncio.Event(), ""
    rollout.engine.script = [[gate, EngineError("gone")]]
    body = {"model": "m", "max_tokens": 400, "messages": HELLO, "stream": True}
    async with rollout.http.stream("POST", f"{rollout.url}/v1/messages", json=body, headers={"x-api-key": rollout.key}) as answer:
        async for text in answer.aiter_text():
            got += text
            gate.set()
    assert got.count("event: error") == 1 and got.rstrip().rsplit("\n\n", 1)[-1].startswith("event: error")


async def test_tokens_arrive_while_the_policy_samples(rollout: Rollout) -> None:
    gate, got = asyncio.Event(), ""
    rollout.engine.script = [["First. ", "x", gate, "Second.<|im_end|>"]]
    body = {"model": "m", "max_tokens": 400, "messages": HELLO, "stream": True}
    async with rollout.http.stream("POST", f"{rollout.url}/v1/chat/completions", json=body, headers={"x-api-key": rollout.key}) as answer:
        async for text in answer.aiter_text():
            got += text
            if "First." in got and not gate.is_set():
                assert "Second." not in got
                gate.set()
    assert "Second." in got and got.endswith("data: [DONE]\n\n")


class Faulty:
    """Samples token p % 50 + 1 at position p with log-prob -p / 1000, and one fault per entry: how many tokens come first, and whether
    the call then fails or is aborted. The version goes up with every fault."""

    def __init__(self, faults: list[tuple[int, bool]], streams: bool) -> None:
        self.faults, self.streams, self.version = list(faults), streams, 0
        self.salts: list[str] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.salts.append(request.salt)
        room, on_tokens, first = request.sampling.max_tokens, request.on_tokens, request.routes_from
        version, start = self.version, len(request.prompt_ids)
        count, fails = self.faults.pop(0) if self.faults else (room, None)
        at = range(start, start + min(count, room))
        ids, log_probs = [p % 50 + 1 for p in at], [-p / 1000 for p in at]
        if self.streams or fails:
            for one in zip(ids, log_probs, strict=True):
                assert on_tokens is not None
                on_tokens([one[0]], [one[1]])
        if fails is not None:
            self.version += 1
        if fails:
            raise EngineUnavailable("lost")
        whole = np.array([*request.prompt_ids, *ids])
        rows = routes_at(whole[first:-1], np.arange(first, len(whole) - 1))
        return Generation(ids, log_probs, rows, "length" if fails is None else "aborted", version)


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=5), st.booleans())
def test_an_interrupted_turn_is_the_turn_that_it_would_have_been(faults: list[tuple[int, bool]], streams: bool) -> None:
    engine, heard = Faulty(faults, streams), list[int]()
    prompt, sampling = list(range(1, 8)), Sampling(1.0, 30, ())
    upstream = Upstream(engine, Patience(backoff=0, attempts=20))
    turn = asyncio.run(upstream.generate(GenerationRequest("s", np.array(prompt, np.int32), sampling, 2, lambda ids, _: heard.extend(ids))))
    positions = np.arange(len(prompt), len(prompt) + 30)
    assert turn.token_ids == (positions % 50 + 1).tolist() and turn.token_ids[: len(heard)] == heard
    assert turn.log_probs == (-positions / 1000).tolist()
    spans = turn.spans or ((0, turn.version),)
    cuts = list(itertools.accumulate(count for count, _ in faults))
    expected = [sum(cut <= i for cut in cuts) for i in range(30)]
    if not any(fails for _, fails in faults):  # a call that fails cannot say which version it had
        assert np.repeat([v for _, v in spans], np.diff([*(o for o, _ in spans), 30])).tolist() == expected
    whole = np.array([*prompt, *turn.token_ids])
    if turn.routes is not None:
        np.testing.assert_array_equal(turn.routes, routes_at(whole[2:-1], np.arange(2, len(whole) - 1)))
    lost = any(fails and count and cut - count < 30 for (count, fails), cut in zip(faults, cuts, strict=True))
    assert (turn.routes is None) == lost
