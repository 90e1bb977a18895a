"""An agent that can reach its own proxy must not be able to end its trial as a failure of ours: that would escape a zero."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.trainer.proxy.conftest import Rollout, until
from tests.trainer.scripted import call, calls, say
from trainer.capture.capture import Capture
from trainer.capture.message import Message
from trainer.proxy.rendering import QUICK, Rendering
from trainer.vocabulary import byte_level

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {}}}}]
START = [{"role": "user", "content": "hi"}]


async def chat(rollout: Rollout, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "tools": TOOLS}
    answer = await rollout.http.post(f"{rollout.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {rollout.key}"})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": made["id"], "content": "ok"} for made in message["tool_calls"]]


async def healthy(rollout: Rollout) -> Capture:
    """The rollout answers, and nothing of what came before counts against it."""
    rollout.engine.script = [say("fine")]
    assert (await chat(rollout, [{"role": "user", "content": "still there?"}]))["content"] == "fine"
    capture = await rollout.close()
    assert capture.proxy_error is capture.engine_error is None
    return capture


HALF = '{"model": "m", "input": "a\ud800b", "messages": [{"role": "user", "content": "a\ud800b"}]}'


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses", "messages/count_tokens"])
@pytest.mark.parametrize("raw", [HALF.encode("utf-8", "surrogatepass"), json.dumps({"messages": START}).encode("utf-16"), b"\x00{}"])
async def test_text_that_is_no_utf8_is_a_bad_request(rollout: Rollout, path: str, raw: bytes) -> None:
    answer = await rollout.http.post(f"{rollout.url}/v1/{path}", content=raw, headers={"x-api-key": rollout.key})
    assert answer.status_code == 400 and "not valid JSON" in answer.text
    await healthy(rollout)


async def test_half_a_surrogate_pair_in_sampled_arguments_survives_a_new_render(rollout: Rollout) -> None:
    """JSON can spell it, no tokenizer takes it, and an edited history makes the proxy render the call anew."""
    rollout.engine.script = [
        '<tool_call>\n{"name": "bash", "arguments": {"command": "a\\ud800b\\ud83d\\ude00"}}\n</tool_call><|im_end|>',
        say("one"),
        say("two"),
    ]
    message = await chat(rollout, START)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"command": "a\ufffdb😀"}
    await chat(rollout, [*START, message, *results(message)])
    await chat(rollout, [{"role": "user", "content": "edited"}, message, *results(message)])
    await healthy(rollout)


def nested(depth: int) -> tuple[str, str]:
    """A sampled call with such arguments, and the arguments."""
    value = "[" * depth + "]" * depth
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"a": {value}}}}}\n</tool_call><|im_end|>', value


async def test_arguments_nested_too_deep_are_a_malformed_call(rollout: Rollout) -> None:
    """They could not come back in a body of bounded depth; as text they can."""
    sampled, value = nested(200)
    rollout.engine.script = [sampled, say("one"), say("two")]
    message = await chat(rollout, START)
    assert "tool_calls" not in message and value in message["content"]
    await chat(rollout, [*START, message, {"role": "user", "content": "go on"}])
    await chat(rollout, [{"role": "user", "content": "edited"}, message, {"role": "user", "content": "go on"}])
    await healthy(rollout)


@pytest.mark.parametrize(("depth", "usable"), [(40, True), (48, False), (1100, False), (1490, False), (5000, False)])
def test_no_depth_of_arguments_is_too_much_for_the_parser(rendering: Rendering, tokenizer: Tokenizer, depth: int, usable: bool) -> None:
    parsed = rendering.parse([], tokenizer.encode(nested(depth)[0], add_special_tokens=False).ids, [])
    assert (len(parsed.calls), parsed.malformed) == ((1, 0) if usable else (0, 1))


async def test_calls_that_were_never_made_are_only_text_to_the_proxy(rollout: Rollout) -> None:
    """Ids of other turns, in another order, twice, with other names, or of no turn at all."""
    rollout.engine.script = [calls(("bash", {"a": 1}), ("bash", {"a": 2})), call("bash"), *[say(f"{n}") for n in range(6)]]
    first = await chat(rollout, START)
    second = await chat(rollout, [*START, first, *results(first)])
    one, two = first["tool_calls"]
    other = {"id": "call_x", "type": "function", "function": {"name": "rm", "arguments": "{"}}
    renamed = {**one, "function": {**one["function"], "name": "x"}}
    for made in ([two, one], [one, one], [one], [one, second["tool_calls"][0]], [other], [renamed, two]):
        forged = {"role": "assistant", "content": "", "tool_calls": made}
        await chat(rollout, [*START, forged, *results(forged), {"role": "user", "content": "go on"}])
    capture = await healthy(rollout)
    assert sum(int(sample.mask.sum()) for sample in capture.samples()) == capture.sampled_tokens


async def test_what_cannot_fit_is_refused_before_it_is_rendered_and_leaves_nothing(rollout: Rollout, context: int) -> None:
    """Two megabytes would be rendered for seconds, and kept. Claude Code cuts its history by the number that it is told."""
    text = "word " * 400_000
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}
    headers = {"x-api-key": rollout.key}
    answer = await rollout.http.post(f"{rollout.url}/v1/messages", json=body, headers=headers)
    counted = await rollout.http.post(f"{rollout.url}/v1/messages/count_tokens", json=body, headers=headers)
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    tokens = int(said.removeprefix("prompt is too long: ").split()[0])
    assert said == f"prompt is too long: {tokens} tokens > {context} maximum"
    assert tokens == counted.json()["input_tokens"] == pytest.approx(len(text), rel=0.01)  # here a token is a byte
    slightly = {**body, "messages": [{"role": "user", "content": "x" * context}]}
    answer = await rollout.http.post(f"{rollout.url}/v1/messages", json=slightly, headers=headers)
    assert answer.status_code == 400
    capture = await rollout.close()
    assert capture.over_length and [node for node in capture.graph.nodes() if node.parent is not None] == []


def test_a_long_text_of_long_tokens_is_not_refused() -> None:
    """A run of blanks is few tokens, however many characters it has."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("\u2588" * 64, normalized=False)])
    rendering = Rendering(tokenizer)
    text = "\u2588" * 320_000
    assert rendering.overlong([Message("user", text)], "", 4800) == pytest.approx(5000, rel=0.01)
    assert rendering.overlong([Message("user", text)], "", 5000) == 0
    assert rendering.overlong([Message("user", text[:QUICK])], "", 1) == 0


async def test_calls_that_are_given_up_leave_nothing(rollout: Rollout) -> None:
    rollout.engine.gate = asyncio.Event()
    for n in range(3):
        body = {"model": "m", "messages": [*START, {"role": "user", "content": f"{n}"}]}
        asking = asyncio.create_task(
            rollout.http.post(f"{rollout.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {rollout.key}"})
        )
        await until(lambda n=n: rollout.engine.started == n + 1)
        asking.cancel()
        await until(lambda n=n: rollout.engine.cancelled == n + 1)
    rollout.engine.gate = None
    capture = await healthy(rollout)
    assert capture.cancelled == 3
    assert sum(node.parent is not None for node in capture.graph.nodes()) == 2  # the question and its answer


async def test_names_that_a_client_makes_up_fill_neither_log_nor_memory(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainer.proxy")
    rollout.engine.script = [say("fine")]
    headers = {"authorization": f"Bearer {rollout.key}"}
    made_up = {f"field {n}\nERROR forged" + "x" * 1000: 1 for n in range(1000)}
    body = {"model": "m", "messages": START}
    assert (await rollout.http.post(f"{rollout.url}/v1/chat/completions", json=body | made_up, headers=headers)).status_code == 200
    await rollout.http.post(f"{rollout.url}%0aERROR%20forged/v1/messages", json=body)
    for path in ("chat/completions", "messages", "responses"):
        answer = await rollout.http.post(f"{rollout.url}/v1/{path}", json=body | {"model": "m" * 10_000, "input": "hi"}, headers=headers)
        assert answer.status_code == 400 and "model must be a string of at most 256 characters" in answer.text
    assert not any(line.startswith("ERROR forged") for line in caplog.text.splitlines())
    capture = await healthy(rollout)
    assert len(capture.unknown_fields) == 200 and max(map(len, capture.unknown_fields)) <= 256
