"""An agent that can reach its own proxy must not be able to end its trial as a failure of ours: that would escape a zero."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.trainer.proxy.conftest import Rollout
from tests.trainer.scripted import call, calls, say
from trainer.capture.capture import Capture
from trainer.proxy.rendering import Rendering

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
