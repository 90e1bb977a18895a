from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest

from server.schemas.capture import BranchReason
from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout
from tests.trainer.scripted import call, calls, say

pytestmark = pytest.mark.anyio

BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
START: list[Any] = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "Fix calc.py, please."}]


def tool_result(call_id: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


async def ask(rollout: Rollout, messages: list[Any], **more: Any) -> Any:
    answer = await rollout.openai.chat.completions.create(model="any-name", messages=messages, tools=[BASH], **more)
    return answer.choices[0].message


async def test_conversation_is_one_branch(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", "I list the files.", command="ls"), call("bash", command="cat calc.py"), say("Done.")]
    messages = list(START)
    for _ in range(2):
        message = await ask(rollout, messages)
        messages += [message.model_dump(exclude_none=True), tool_result(message.tool_calls[0].id, '{"returncode": 0}')]
    answer = await rollout.openai.chat.completions.create(model="other", messages=messages, tools=[BASH])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rollout.engine.calls[2].prompt)
    assert answer.usage.completion_tokens == len(rollout.engine.calls[2].sampled)

    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert (sample.reason, sample.excluded) == (BranchReason.ROOT, None)
    last = rollout.engine.calls[-1]
    assert sample.tokens.tolist() == last.prompt + last.sampled
    assert int(sample.mask.sum()) == sum(len(c.sampled) for c in rollout.engine.calls)
    assert capture.policy_turns == 3
    assert rollout.engine.released == ["r-1"]


async def test_tool_call_arrives_as_sampled(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", "I look.", command="echo 'é' \"x\"\n")]
    message = await ask(rollout, START)
    assert message.content == "I look."
    assert message.tool_calls[0].function.name == "bash"
    assert json.loads(message.tool_calls[0].function.arguments) == {"command": "echo 'é' \"x\"\n"}


async def test_every_row_of_routes_but_the_last_is_filled(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", command="ls"), say("Done.")]
    message = await ask(rollout, START)
    await ask(rollout, [*START, message.model_dump(), tool_result(message.tool_calls[0].id, "a")])
    first, second = rollout.engine.calls
    assert (first.routes_from, second.routes_from) == (0, len(first.prompt) + len(first.sampled) - 1)
    (sample,) = (await rollout.close()).samples()
    assert np.flatnonzero(~sample.routed).tolist() == [len(sample.tokens) - 1]


async def test_streaming_is_the_same_turn(rollout: Rollout) -> None:
    rollout.engine.script = [calls(("bash", {"command": "ls"}), ("bash", {"command": "pwd"}), text="Both.")]
    stream = await rollout.openai.chat.completions.create(
        model="m", messages=START, tools=[BASH], stream=True, stream_options={"include_usage": True}
    )
    text, arguments, finish, usage = "", {}, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or []:
                assert part.function is not None
                arguments[part.id] = part.function.arguments
    assert (text, finish) == ("Both.", "tool_calls")
    assert [json.loads(a or "") for a in arguments.values()] == [{"command": "ls"}, {"command": "pwd"}]
    assert usage is not None and usage.completion_tokens == len(rollout.engine.calls[0].sampled)

    back = {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [{"id": i, "type": "function", "function": {"name": "bash", "arguments": a}} for i, a in arguments.items()],
    }
    rollout.engine.script = [say("Done.")]
    await ask(rollout, [*START, back, *(tool_result(str(i), "ok") for i in arguments)])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert len(capture.samples()) == 1


async def test_malformed_turn_that_the_harness_drops_becomes_a_branch(rollout: Rollout) -> None:
    rollout.engine.script = [
        call("bash", command="ls"),
        '<tool_call>\n{"name": "bash", oops}\n</tool_call><|im_end|>',
        say("no call either"),
        call("bash", command="cat calc.py"),
        say("Done."),
    ]
    first = await ask(rollout, START)
    good = [*START, first.model_dump(), tool_result(first.tool_calls[0].id, "calc.py")]
    broken = await ask(rollout, good)
    assert broken.tool_calls is None and "oops" in broken.content
    errors = [{"role": "user", "content": f"Format error {i}"} for i in range(2)]
    await ask(rollout, [*good, errors[0]])
    fourth = await ask(rollout, [*good, *errors])
    await ask(rollout, [*good, *errors, fourth.model_dump(), tool_result(fourth.tool_calls[0].id, "def add")])

    capture = await rollout.close()
    audit(capture, rollout.engine)
    main, *sides = capture.samples()
    assert main.reason is BranchReason.ROOT
    assert [side.reason for side in sides] == [BranchReason.MALFORMED_TURN] * 2
    assert all(sample.excluded is None for sample in (main, *sides))
    last = rollout.engine.calls[-1]
    assert main.tokens.tolist() == last.prompt + last.sampled
    for side, i in zip(sides, (1, 2), strict=True):
        assert side.tokens[side.mask].tolist() == rollout.engine.calls[i].sampled
    assert capture.malformed_turns == 2


async def test_cut_turn_says_length_and_goes_on(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", "x" * 600, command="ls"), say("ok")]
    answer = await rollout.openai.chat.completions.create(model="m", messages=START, tools=[BASH])
    assert answer.choices[0].finish_reason == "length"
    cut = answer.choices[0].message.model_dump(exclude_none=True)
    await ask(rollout, [*START, cut, {"role": "user", "content": "Go on."}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert int(sample.mask.sum()) == 500 + len(rollout.engine.calls[1].sampled)  # the turn end that the template needs is not trained


async def test_edited_history_starts_a_branch(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", command="ls"), call("bash", command="pwd"), say("Done.")]
    first = await ask(rollout, START)
    result = tool_result(first.tool_calls[0].id, "a b c")
    second = await ask(rollout, [*START, first.model_dump(), result])
    cleared = tool_result(first.tool_calls[0].id, "[Old tool result content cleared]")
    await ask(rollout, [*START, first.model_dump(), cleared, second.model_dump(), tool_result(second.tool_calls[0].id, "/")])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [sample.reason for sample in capture.samples()] == [BranchReason.ROOT, BranchReason.HISTORY_EDITED]


async def test_client_parameters_only_lower_the_limit(rollout: Rollout) -> None:
    rollout.engine.script = [say("a"), say("b")]
    await ask(rollout, START, temperature=0, max_tokens=100_000)
    assert rollout.engine.calls[0].sampling.temperature == 1.0
    assert rollout.engine.calls[0].sampling.max_tokens == 500
    await ask(rollout, [*START, {"role": "user", "content": "again"}], max_tokens=7)
    assert rollout.engine.calls[1].sampling.max_tokens == 7


async def test_unknown_fields_are_accepted_and_recorded(rollout: Rollout) -> None:
    rollout.engine.script = [say("a")]
    await ask(rollout, START, extra_body={"prompt_cache_key": "x", "chat_template_kwargs": {}})
    assert (await rollout.close()).record("t").unknown_fields == ["chat_template_kwargs", "prompt_cache_key"]


@pytest.mark.parametrize("max_turns", [1])
async def test_turn_cap_ends_the_harness(rollout: Rollout) -> None:
    rollout.engine.script = [call("bash", command="ls")]
    message = await ask(rollout, START)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await ask(rollout, [*START, message.model_dump(), tool_result(message.tool_calls[0].id, "a")])
    capture = await rollout.close()
    assert (capture.turn_cap_hit, capture.over_length, capture.policy_turns) == (True, False, 1)


@pytest.mark.parametrize("context", [600])
async def test_overflow_in_the_clients_words(rollout: Rollout) -> None:
    rollout.engine.script = [say("short")]
    first = await ask(rollout, START)
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 600 tokens"):
        await ask(rollout, [*START, first.model_dump(), {"role": "user", "content": "y" * 600}])
    assert (await rollout.close()).over_length
