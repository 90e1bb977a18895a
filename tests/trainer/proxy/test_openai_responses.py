"""Codex's wire format, with the official client as its parser."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from server.schemas.capture import BranchReason
from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout
from tests.trainer.scripted import call, calls, say
from trainer.proxy.dialects.openai_responses import OpenAIResponses

pytestmark = pytest.mark.anyio

EXEC: Any = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": {"type": "grammar", "syntax": "lark"}}
PROBE: Any = {"type": "function", "name": "probe", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [EXEC, PATCH, {"type": "namespace", "name": "mcp__a", "tools": [PROBE]}, {"type": "web_search"}]
START: list[Any] = [
    {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "You fix code."}]},
    {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: off."}]},
    {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Fix calc.py."}]},
]


def result(call_id: str, output: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "id": "fco_1", "call_id": call_id, "output": output}


async def ask(rollout: Rollout, items: Any, **more: Any) -> Any:
    return await rollout.openai.responses.create(model="any", input=items, tools=TOOLS, **more)


async def stream(rollout: Rollout, items: Any, **more: Any) -> Any:
    async with rollout.openai.responses.stream(model="any", input=items, tools=TOOLS, **more) as events:
        return await events.get_final_response()


def back(answer: Any) -> list[Any]:
    """As Codex sends a turn back: every item with its id, `annotations` added, the content of reasoning dropped."""
    return [{**item.model_dump(exclude_none=True, exclude={"parsed_arguments"})} for item in answer.output]


@pytest.mark.parametrize("send", [ask, stream])
async def test_conversation_of_all_kinds_of_items_is_one_branch(rollout: Rollout, send: Any) -> None:
    patch = "*** Begin Patch\n*** Update File: calc.py\n*** End Patch\n"
    rollout.engine.script = [
        "<think>\nLet me look.\n</think>\n\n" + call("exec_command", "I list.", cmd="ls"),
        calls(("apply_patch", {"input": patch}), ("probe", {})),
        say("Done."),
    ]
    first = await send(rollout, START)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output[0].summary[0].text == "Let me look."
    assert json.loads(first.output[2].arguments) == {"cmd": "ls"}
    items = [*START, *back(first), result(first.output[2].call_id, "calc.py")]
    second = await send(rollout, items)
    custom, probe = second.output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", patch)
    assert (probe.type, probe.name, probe.namespace) == ("function_call", "probe", "mcp__a")
    outputs = [
        result(custom.call_id, [{"type": "input_text", "text": "ok"}], "custom_tool_call_output"),
        result(probe.call_id, "1"),
    ]
    third = await send(rollout, [*items, *back(second), *outputs])
    assert (third.output_text, third.status) == ("Done.", "completed")
    assert third.usage.input_tokens == len(rollout.engine.calls[2].prompt)
    assert third.usage.output_tokens == len(rollout.engine.calls[2].sampled)
    capture = await rollout.close()
    audit(capture, rollout.engine)
    (sample,) = capture.samples()
    assert (sample.reason, sample.excluded) == (BranchReason.ROOT, None)
    text = rollout.engine.tokenizer.decode(rollout.engine.calls[0].prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou fix code.\nSandbox: off.\n")
    assert capture.record("t").unknown_fields == ["tools.web_search"]


async def test_events_that_come_while_the_policy_samples_are_numbered_in_order(rollout: Rollout) -> None:
    gate, numbers = asyncio.Event(), list[int]()
    rollout.engine.script = [["I list", gate, call("exec_command", cmd="ls")]]
    async for event in await rollout.openai.responses.create(model="m", input=START, tools=TOOLS, stream=True):
        numbers.append(event.sequence_number)
        gate.set()
    assert numbers == list(range(len(numbers)))


async def test_events_are_numbered_and_well_formed(rollout: Rollout) -> None:
    rollout.engine.script = ["<think>\nHm.\n</think>\n\n" + call("exec_command", "I list.", cmd="ls")]
    seen = [event async for event in await rollout.openai.responses.create(model="m", input=START, tools=TOOLS, stream=True)]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    kinds = [event.type.removeprefix("response.") for event in seen]
    assert kinds[:2] == ["created", "in_progress"]
    assert [kind for kind in kinds[2:] if not kind.endswith(".delta")] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.done", "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    assert done == seen[-1].response.output


async def test_cut_answer_is_incomplete(rollout: Rollout) -> None:
    rollout.engine.script = [say("x" * 600), say("y" * 600)]
    answer = await ask(rollout, "Go.")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    seen = [event async for event in await rollout.openai.responses.create(model="m", input="Again.", stream=True)]
    assert seen[-1].type == "response.incomplete"


def parse(items: Any, headers: dict[str, str] | None = None, **more: Any) -> Any:
    return OpenAIResponses().parse({"model": "m", "input": items, "tools": TOOLS, **more}, headers or {})


def test_items_of_two_turns_are_told_apart() -> None:
    """A turn's items come as reasoning, text, calls; what goes back in that order was sampled later."""
    text = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": t, "annotations": []}]} for t in "ab"]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "content": None}
    calls = [{"type": "function_call", "call_id": i, "name": "probe", "namespace": "mcp__a", "arguments": "{}"} for i in "12"]
    messages = parse([{"role": "user", "content": "x"}, thought, text[0], *calls, text[1], thought]).messages
    assert [(m.content, [c.id for c in m.tool_calls], m.reasoning) for m in messages[1:]] == [
        ("a", ["1", "2"], "t"),
        ("b", [], None),
        ("", [], "t"),
    ]


def test_tools_of_one_name_in_two_namespaces_stay_apart() -> None:
    tools = [{"type": "namespace", "name": name, "tools": [PROBE]} for name in ("mcp__a", "mcp__b")]
    call_b = {"type": "function_call", "call_id": "1", "name": "probe", "namespace": "mcp__b", "arguments": "{}"}
    request = parse([{"role": "user", "content": "x"}, call_b], tools=tools)
    assert [tool["function"]["name"] for tool in request.tools] == ["mcp__a__probe", "mcp__b__probe"]
    assert request.messages[1].tool_calls[0].name == "mcp__b__probe"
    assert "probe" not in request.origins


def test_codex_names_its_threads_and_its_compaction() -> None:
    """Sub-agents have another `thread-id`; a request says what it is for."""
    headers = {
        "thread-id": "t2",
        "session-id": "s",
        "x-codex-turn-metadata": json.dumps({"request_kind": "compaction"}),
    }
    request = parse("Hello.", headers)
    assert (request.thread, request.kind_hint) == ("t2", "summary")
    assert parse("Hello.", {"x-codex-turn-metadata": json.dumps({"request_kind": "turn"})}).kind_hint == ""
    assert parse("Hello.", {"x-codex-turn-metadata": "{broken"}).kind_hint == ""


@pytest.mark.parametrize("context", [700])
async def test_overflow_ends_codex(rollout: Rollout) -> None:
    """Any 400 ends Codex; the code is what it reports, the words are those that LiteLLM looks for."""
    with pytest.raises(openai.BadRequestError, match="maximum context length is 700 tokens") as error:
        await ask(rollout, "z" * 700)
    assert error.value.code == "context_length_exceeded"
    assert (await rollout.close()).over_length


@pytest.mark.parametrize("more", [{"previous_response_id": "resp_1"}, {"items": [{"type": "item_reference", "id": "msg_1"}]}])
async def test_stored_responses_are_refused(rollout: Rollout, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="no response is stored here"):
        await ask(rollout, more.pop("items", "Go on."), **more)


async def test_two_turns_with_nothing_between_stay_two(rollout: Rollout) -> None:
    """Text behind text, and a call behind text: the second case is told by the ids of the items, which name the answer they are from."""
    rollout.engine.script = [say("First."), say("Second."), call("exec_command", cmd="ls"), say("Done.")]
    items = list(START)
    for _ in range(3):
        answer = await ask(rollout, items)
        items += back(answer)
    items.append(result(answer.output[-1].call_id, "calc.py"))
    await ask(rollout, items)
    capture = await rollout.close()
    audit(capture, rollout.engine)
    assert [turn.returned for turn in capture.graph.turns] == [True, True, True, False]
    path = capture.graph.turns[3].path()
    assert [node for node in path if node in capture.graph.turns] == capture.graph.turns
