from __future__ import annotations

from typing import Any

import anthropic
import pytest

from server.schemas.capture import BranchClass, BranchReason, Exclusion
from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout
from tests.trainer.scripted import call, calls, say

pytestmark = pytest.mark.anyio

BASH: Any = {
    "name": "Bash",
    "description": "Run a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
START: Any = [{"role": "user", "content": [{"type": "text", "text": "Fix calc.py.", "cache_control": {"type": "ephemeral"}}]}]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.0b8; cc_entrypoint=sdk-cli;"},
    {"type": "text", "text": "You fix code.", "cache_control": {"type": "ephemeral"}},
]


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


async def ask(rollout: Rollout, messages: list[Any], **more: Any) -> anthropic.types.Message:
    fields: dict[str, Any] = {"model": "claude-any", "max_tokens": 20_000, "system": SYSTEM, "tools": [BASH], **more}
    return await rollout.anthropic.messages.create(messages=messages, **fields)


async def stream(rollout: Rollout, messages: list[Any], **more: Any) -> anthropic.types.Message:
    fields: dict[str, Any] = {"model": "claude-any", "max_tokens": 20_000, "system": SYSTEM, "tools": [BASH], **more}
    async with rollout.anthropic.messages.stream(messages=messages, **fields) as events:
        return await events.get_final_message()


def back(message: anthropic.types.Message) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


@pytest.mark.parametrize("send", [ask, stream])
async def test_turn_reaches_the_official_client(rollout: Rollout, send: Any) -> None:
    rollout.engine.script = [calls(("Bash", {"command": "ls", "n": 2**70}), ("Bash", {"command": "é"}), text="Look.")]
    message = await send(rollout, START)
    text, first, second = message.content
    assert (text.text, first.input, second.input) == ("Look.", {"command": "ls", "n": 2**70}, {"command": "é"})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == len(rollout.engine.calls[0].prompt)
    assert message.usage.output_tokens == len(rollout.engine.calls[0].sampled)


async def test_usage_is_true_from_the_first_event(rollout: Rollout) -> None:
    rollout.engine.script = [say("Hello.")]
    events = await rollout.anthropic.messages.create(model="m", max_tokens=9_000, messages=START, stream=True)
    seen = [event async for event in events]
    assert [event.type for event in seen] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert isinstance(seen[0], anthropic.types.RawMessageStartEvent)
    assert seen[0].message.usage.input_tokens == len(rollout.engine.calls[0].prompt)


async def test_thinking_comes_back_and_extends_the_branch(rollout: Rollout) -> None:
    rollout.engine.script = ["<think>\nHm, two files.\n</think>\n\n" + call("Bash", "I list.", command="ls"), say("Done.")]
    first = await stream(rollout, START, thinking={"type": "adaptive"})
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    calls_only = {"role": "assistant", "content": [block.model_dump() for block in first.content if block.type == "tool_use"]}
    await stream(rollout, [*START, calls_only, {"role": "user", "content": [result(first.content[2].id, "a")]}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert len(capture.samples()) == 1


async def test_changes_of_form_do_not_break_the_prefix(rollout: Rollout) -> None:
    """Everything that Claude Code changes between two requests without meaning it."""
    rollout.engine.script = [calls(("Bash", {"b": 1, "a": "x  \n"}), ("Bash", {"command": "pwd"}), text="Both."), say("Done.")]
    system_message = {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]}
    first = await stream(rollout, [*START, system_message])
    _, one, two = first.content
    edited = {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Both."},
            {"type": "tool_use", "id": one.id, "name": "Bash", "input": {"a": "x", "b": 1, "replace_all": False}},
            {"type": "tool_use", "id": two.id, "name": "Bash", "input": {"command": "pwd"}},
        ],
    }
    results = [result(two.id, [{"type": "text", "text": "/"}], is_error=False), result(one.id, "ok", cache_control={"type": "ephemeral"})]
    other_system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.fff;"}, SYSTEM[1]]
    start = [{"role": "user", "content": "Fix calc.py."}, {"role": "system", "content": "Agents: none."}]
    await stream(
        rollout,
        [*start, edited, {"role": "user", "content": results}],
        system=other_system,
        extra_body={"context_management": {"edits": []}, "output_config": {"effort": "high"}},
    )
    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert int(sample.mask.sum()) == sum(len(c.sampled) for c in rollout.engine.calls)
    text = rollout.engine.tokenizer.decode(rollout.engine.calls[0].prompt, skip_special_tokens=False)
    assert "billing" not in text
    assert "Fix calc.py.\n<system-reminder>\nAgents: none.\n</system-reminder>" in text
    assert capture.record("t").unknown_fields == ["context_management", "output_config"]


async def test_partial_turn_is_no_match(rollout: Rollout) -> None:
    rollout.engine.script = [calls(("Bash", {"command": "a"}), ("Bash", {"command": "b"})), say("Done.")]
    first = await ask(rollout, START)
    partial = {"role": "assistant", "content": [first.content[0].model_dump()]}
    await ask(rollout, [*START, partial, {"role": "user", "content": [result(first.content[0].id, "x")]}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [sample.reason for sample in capture.samples()] == [BranchReason.ROOT, BranchReason.HISTORY_EDITED]
    assert [sample.excluded for sample in capture.samples()] == [None, None]


async def test_sub_agent_and_side_call_are_their_own_branches(rollout: Rollout) -> None:
    rollout.engine.script = [call("Bash", command="task"), say("Sub result."), say("A title"), say("Done.")]
    first = await ask(rollout, START)
    await ask(
        rollout, [{"role": "user", "content": "Sub task."}], extra_headers={"x-claude-code-agent-id": "a1"}, system="You are a sub-agent."
    )
    await ask(rollout, [{"role": "user", "content": "Write a title."}], tools=[], system="Titles.")
    await ask(rollout, [*START, back(first), {"role": "user", "content": [result(first.content[0].id, "Sub result.")]}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [(sample.branch_class, sample.excluded) for sample in capture.samples()] == [
        (BranchClass.POLICY, None),
        (BranchClass.SUB_AGENT, None),
        (BranchClass.AUXILIARY, Exclusion.AUXILIARY),
    ]


async def test_changed_tools_start_a_branch(rollout: Rollout) -> None:
    rollout.engine.script = [call("Bash", command="ls"), say("Done.")]
    first = await ask(rollout, START)
    more = [*START, back(first), {"role": "user", "content": [result(first.content[0].id, "a")]}]
    await ask(rollout, more, tools=[BASH, {**BASH, "name": "Read"}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [sample.reason for sample in capture.samples()] == [BranchReason.ROOT, BranchReason.TOOLS_CHANGED]


async def test_compaction_starts_a_branch(rollout: Rollout) -> None:
    rollout.engine.script = [say("One."), say("Two.")]
    await ask(rollout, START)
    await ask(rollout, [{"role": "user", "content": "This session is being continued. Summary: nothing yet."}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [sample.reason for sample in capture.samples()] == [BranchReason.ROOT, BranchReason.COMPACTION]


async def test_note_inside_the_last_user_message_is_no_compaction(rollout: Rollout) -> None:
    rollout.engine.script = ["<|im_end|>", say("Two.")]
    assert (await ask(rollout, START)).content == []
    await ask(rollout, [{"role": "user", "content": "Fix calc.py.\n[Your previous response had no visible output.]"}])
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [sample.reason for sample in capture.samples()] == [BranchReason.ROOT, BranchReason.HISTORY_EDITED]


@pytest.mark.parametrize("context", [700])
async def test_overflow_in_claude_codes_words(rollout: Rollout) -> None:
    rollout.engine.script = [say("One.")]
    first = await ask(rollout, START)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 700 maximum"):
        await ask(rollout, [*START, back(first), {"role": "user", "content": "z" * 700}])
    assert (await rollout.close()).over_length


async def test_count_tokens_is_the_prompt_that_would_be_sent(rollout: Rollout) -> None:
    rollout.engine.script = [say("One.")]
    body: Any = {"model": "m", "system": SYSTEM, "tools": [BASH], "messages": START}
    counts = [(await rollout.anthropic.messages.count_tokens(**body)).input_tokens for _ in range(2)]
    await ask(rollout, START)
    assert counts == [len(rollout.engine.calls[0].prompt)] * 2
    assert (await rollout.close()).policy_turns == 1
