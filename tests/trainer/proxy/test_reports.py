"""Public reports about harnesses and gateways that belong to the dialects, each with the value that is right here. Numbers: issue list."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import anthropic
import pytest

from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout
from tests.trainer.scripted import call, calls, say
from trainer.proxy import session
from trainer.proxy.dialects.anthropic import Anthropic

pytestmark = pytest.mark.anyio

BASH: Any = {"name": "Bash", "description": "Run", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
FUNCTION: Any = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
START: Any = [{"role": "user", "content": "Fix calc.py."}]


def billing(nonce: str) -> list[Any]:
    return [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"},
        {"type": "text", "text": "You fix code."},
    ]


async def ask(rollout: Rollout, messages: Any, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": "claude-haiku-4-5", "max_tokens": 20_000, "system": "You fix code.", "tools": [BASH], **more}
    return await rollout.anthropic.messages.create(messages=messages, **fields)


async def chat(rollout: Rollout, **more: Any) -> Any:
    return await rollout.openai.chat.completions.create(model="any", messages=START, tools=[FUNCTION], **more)


def back(message: anthropic.types.Message) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


def answers(message: anthropic.types.Message) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": block.id, "content": "ok"} for block in message.content if block.type == "tool_use"]


async def test_billing_line_with_its_nonce_is_no_part_of_the_prompt(rollout: Rollout) -> None:
    """Pain 14."""
    rollout.engine.script = [say("One."), say("Two."), say("Three.")]
    for system in (billing("a1"), billing("b2"), "You fix code."):
        await ask(rollout, START, system=system, extra_headers={"x-claude-code-agent-id": json.dumps(system)[:40]})
    first, second, third = (call.prompt for call in rollout.engine.calls)
    assert first == second == third


async def test_system_message_in_the_middle_stays_where_it_is(rollout: Rollout) -> None:
    """Pain 15: folded next to its neighbour, so the prompt before it is still the prefix; moved to the front it would rewrite it."""
    rollout.engine.script = [call("Bash", command="ls"), say("Done."), say("Yes.")]
    first = await ask(rollout, START)
    turn = [*START, back(first), {"role": "user", "content": answers(first)}, {"role": "system", "content": "A task has ended."}]
    second = await ask(rollout, turn)
    await ask(rollout, [*turn, back(second), {"role": "user", "content": "Sure?"}, {"role": "system", "content": "Agents: none."}])
    calls = rollout.engine.calls
    for before, after in pairwise(calls):
        known = before.prompt + before.sampled
        assert after.prompt[: len(known)] == known
    text = rollout.engine.tokenizer.decode(calls[-1].prompt, skip_special_tokens=False)
    assert text.count("<|im_start|>system") == 1
    assert "Sure?\n<system-reminder>\nAgents: none.\n</system-reminder><|im_end|>" in text
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert len(capture.samples()) == 1


def test_block_and_string_and_cache_marks_are_one_form() -> None:
    """Pain 16: cache_control sits on the last message, and what carries it is a list of blocks."""
    mark = {"cache_control": {"type": "ephemeral"}}
    block = {"role": "user", "content": [{"type": "text", "text": "Go.", **mark}]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "ok"}
    marked = {**result, "is_error": False, "content": [{"type": "text", "text": "ok", **mark}], **mark}
    tool = {**BASH, **mark}

    def parse(user: Any, tool_result: Any, offered: Any) -> Any:
        turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "Bash", "input": {}}]}
        messages = [user, turn, {"role": "user", "content": [tool_result]}, {"role": "system", "content": "Note."}]
        return Anthropic().parse({"system": "S", "messages": messages, "tools": [offered]}, {})

    plain, decorated = parse({"role": "user", "content": "Go."}, result, BASH), parse(block, marked, tool)
    assert (plain.messages, plain.tools, plain.call) == (decorated.messages, decorated.tools, decorated.call)


async def test_fields_of_tomorrow_are_accepted(rollout: Rollout) -> None:
    """Pain 18."""
    rollout.engine.script = [say("One.")]
    more = {"context_management": {"edits": []}, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive", "display": "x"}}
    await ask(rollout, START, extra_body=more)
    assert (await rollout.close()).record("t").unknown_fields == ["context_management", "output_config"]


async def test_count_tokens_counts_system_and_tools_and_is_no_turn(rollout: Rollout) -> None:
    """Pain 19."""
    rollout.engine.script = [say("One.")]
    body: Any = {"model": "m", "messages": START, "system": "You fix code."}
    bare = (await rollout.anthropic.messages.count_tokens(**body)).input_tokens
    full = (await rollout.anthropic.messages.count_tokens(**body, tools=[BASH])).input_tokens
    await ask(rollout, START)
    assert bare < full == len(rollout.engine.calls[0].prompt)
    assert (await rollout.close()).policy_turns == 1


@pytest.mark.parametrize("context", [900])
async def test_output_is_clamped_to_the_room_that_is_left(rollout: Rollout) -> None:
    """Pain 20: Claude Code asks for tens of thousands of tokens whatever the context is."""
    rollout.engine.script = [say("One.")]
    first = await ask(rollout, START)
    (made,) = rollout.engine.calls
    assert made.sampling.max_tokens == min(500, 900 - len(made.prompt))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d{4} tokens > 900 maximum"):
        await ask(rollout, [*START, back(first), {"role": "user", "content": "z" * 900}])
    assert (await rollout.close()).over_length


async def test_thinking_may_be_missing_unsigned_or_anywhere(rollout: Rollout) -> None:
    """Pain 22."""
    rollout.engine.script = ["<think>\nHm.\n</think>\n\n" + call("Bash", "I look.", command="ls"), say("Done."), say("Yes."), say("Yes.")]
    first = await ask(rollout, START, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text, use = back(first)["content"]
    unsigned = {"type": "thinking", "thinking": "Hm."}
    for content in ([thinking, text, use], [use, text, unsigned], [{"type": "redacted_thinking", "data": "x"}, use]):
        await ask(rollout, [*START, {"role": "assistant", "content": content}, {"role": "user", "content": answers(first)}])
    prompts = [made.prompt for made in rollout.engine.calls[1:]]
    assert prompts[0] == prompts[1] == prompts[2]


async def test_usage_is_true_in_the_first_event(rollout: Rollout) -> None:
    """Pain 27."""
    rollout.engine.script = [say("One.")]
    events = [event async for event in await ask(rollout, START, stream=True)]
    assert events[0].message.usage.input_tokens == len(rollout.engine.calls[0].prompt)


@pytest.mark.parametrize(
    ("sampled", "shown"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call><|im_end|>', '{"name": "bash", "arguments"'),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call><|im_end|>", "<function=bash>"),
    ],
)
async def test_call_that_cannot_be_read_is_shown_as_text_and_counted(rollout: Rollout, sampled: str, shown: str) -> None:
    """Pain 32."""
    rollout.engine.script = [sampled]
    choice = (await chat(rollout)).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert shown in choice.message.content
    assert (await rollout.close()).malformed_turns == 1


async def test_call_is_found_behind_reasoning_that_mentions_one(rollout: Rollout) -> None:
    """Pain 32: a call is not lost because the reasoning before it holds a draft, or was never closed."""
    draft = "<think>\nMaybe <tool_call>{}</tool_call>?\n</think>\n\n" + call("bash", command="ls")
    rollout.engine.script = [draft, "<think>\nSo:\n" + call("bash", command="pwd")]
    commands = [json.loads((await chat(rollout)).choices[0].message.tool_calls[0].function.arguments)["command"] for _ in range(2)]
    assert commands == ["ls", "pwd"]


async def test_streamed_arguments_are_whole_and_the_stop_reason_follows_the_calls(rollout: Rollout) -> None:
    """Pain 33 and 34."""
    given = [{"command": 'echo "}" \\ é', "n": 2**70}, {"nested": [{"a": None}]}]
    rollout.engine.script = [calls(*(("bash", arguments) for arguments in given), text="Both.")]
    pieces: dict[int, str] = {}
    reasons = set()
    async for chunk in await chat(rollout, stream=True):
        for choice in chunk.choices:
            reasons.add(choice.finish_reason)
            for part in choice.delta.tool_calls or []:
                pieces[part.index] = pieces.get(part.index, "") + part.function.arguments
    assert [json.loads(text) for text in pieces.values()] == given
    assert reasons == {None, "tool_calls"}


async def test_call_is_run_although_the_tokens_ran_out_behind_it(rollout: Rollout) -> None:
    """Pain 34: with any other reason OpenCode ends its loop, qwen-code throws the turn away, and Codex ends the run."""
    rollout.engine.script = [call("bash", command="ls").removesuffix("<|im_end|>") + "\n" + "x" * 600] * 3
    assert (await chat(rollout)).choices[0].finish_reason == "tool_calls"
    assert (await ask(rollout, [{"role": "user", "content": "Go."}])).stop_reason == "tool_use"
    response = await rollout.openai.responses.create(model="m", input="Go on.")
    assert (response.status, response.incomplete_details, response.output[0].type) == ("completed", None, "function_call")
    assert [turn.stop for turn in (await rollout.close()).graph.turns] == ["length"] * 3


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"tools": [BASH]}, ""),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ""),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "auxiliary"),
        ({"output_config": {"effort": "high", "format": {"type": "json_schema"}}}, "auxiliary"),
        ({"output_config": {"format": {}}, "tools": [BASH]}, ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "CRITICAL: Respond with TEXT ONLY. Summarise."}]}]},
            "summary",
        ),
    ],
)
def test_side_calls_of_claude_code_are_known_by_their_own_marks(fields: dict[str, Any], hint: str) -> None:
    """Pain 26: a title, a search, a summary; a tool that Anthropic defined but the client runs makes no side call."""
    assert Anthropic().parse({"messages": START, **fields}, {}).kind_hint == hint


def test_a_tool_of_the_server_is_not_offered_to_the_policy() -> None:
    """A call of it would reach nobody: the client leaves it to the server."""
    request = Anthropic().parse({"messages": START, "tools": [BASH, {"type": "web_search_20250305", "name": "web_search"}]}, {})
    assert [tool["function"]["name"] for tool in request.tools] == ["Bash"]
    assert request.unknown == {"tools.web_search_20250305"}


async def test_any_model_name_is_the_policy(rollout: Rollout) -> None:
    """Pain 26: side calls name models of their own; the list of models holds none that a client could miss."""
    rollout.engine.script = [say("One."), say("Two.")]
    for name in ("claude-haiku-4-5-20251001", "no-such-model"):
        assert (await ask(rollout, START, model=name, extra_headers={"x-session-id": name})).model == name
    assert [model async for model in rollout.openai.models.list()] == []
    assert [model async for model in rollout.anthropic.models.list()] == []
    assert rollout.engine.started == 2


async def test_counting_is_bounded_like_calling(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting renders on the loop that serves every rollout: the same body costs once, other bodies are few until the model is called."""
    monkeypatch.setattr(session, "MAX_COUNTS", 2)
    rollout.engine.script = [say("One.")]
    url, headers = f"{rollout.url}/v1/messages/count_tokens", {"x-api-key": rollout.key}

    async def count(text: str) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return (await rollout.http.post(url, json=body, headers=headers)).status_code

    assert [await count(text) for text in ("a", "b", "a", "c", "b")] == [200, 200, 200, 429, 200]
    await ask(rollout, START)
    assert await count("c") == 200
    assert (await rollout.close()).policy_turns == 1
