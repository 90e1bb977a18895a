"""What clients may send: any JSON gets a request that can be rendered or a refusal, and forms that mean the same give the same request."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainer.capture.request import Request
from trainer.proxy.dialects import Dialect
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.dialects.reader import Reader
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.rendering import Rendering
from trainer.vocabulary import byte_level

SCHEMA: Any = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT: Any = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You fix code."},
        {"role": "user", "content": [{"type": "text", "text": "Go."}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "Runs", "parameters": SCHEMA}}],
    "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5,
}  # fmt: skip
MESSAGES: Any = {
    "model": "m",
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "You fix code."}],
    "messages": [
        {"role": "user", "content": "Go."},
        {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "1", "name": "Bash", "input": {"command": "ls"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "ok"}], "is_error": False},
            {"type": "text", "text": "And?"}]},
    ],
    "tools": [{"name": "Bash", "description": "Runs", "input_schema": SCHEMA}],
    "stream": True, "max_tokens": 5, "output_config": {"effort": "high"},
}  # fmt: skip
RESPONSES: Any = {
    "model": "m",
    "instructions": "You fix code.",
    "input": [
        {"type": "message", "id": "1", "role": "developer", "content": [{"type": "input_text", "text": "Off."}]},
        {"role": "user", "content": "Go."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "probe", "namespace": "a", "arguments": '{"command": "ls"}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "ok"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "compaction", "encrypted_content": "x"},
    ],
    "tools": [
        {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "probe", "parameters": SCHEMA}]},
        {"type": "custom", "name": "apply_patch", "description": "Edits", "format": {"type": "text"}},
        {"type": "web_search"},
    ],
    "stream": True, "max_output_tokens": 5,
}  # fmt: skip
DIALECTS: list[tuple[Dialect, Any]] = [(OpenAIChat(), CHAT), (Anthropic(), MESSAGES), (OpenAIResponses(), RESPONSES)]

RENDERING = Rendering(byte_level())

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
odd = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.deepcopy(body)
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body


@pytest.mark.parametrize(("dialect", "body"), DIALECTS)
@given(data=st.data())
@examples(80)
def test_any_body_is_a_request_or_a_refusal(dialect: Dialect, body: Any, data: Any) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        body = changed(body, data.draw(st.sampled_from(places(body))), data.draw(odd))
    raw = json.dumps(body).encode()
    try:
        request = dialect.parse(Reader().load(raw), {})
    except Refusal as refusal:
        assert refusal.reason is Reason.BAD_REQUEST and refusal.message
        status, said = dialect.refuse(refusal)
        assert status == 400 and json.dumps(said)
        return
    assert isinstance(request, Request) and request.messages
    assert all(isinstance(message.content, str) for message in request.messages)
    assert sum(message.role == "system" for message in request.messages) <= 1
    assert RENDERING.render(request.messages, request.tools).ids


@pytest.mark.parametrize(("dialect", "body"), DIALECTS)
def test_every_turn_and_its_answers_are_understood(dialect: Dialect, body: Any) -> None:
    request = dialect.parse(body, {})
    assert [message.role for message in request.messages][:3] == ["system", "user", "assistant"]
    assistant, answer = request.messages[2:4]
    assert assistant.reasoning == "Hm."
    assert (assistant.tool_calls[0].id, assistant.tool_calls[0].arguments) == ("1", {"command": "ls"})
    assert (answer.role, answer.tool_call_id, answer.content) == ("tool", "1", "ok")
    assert request.tools[0]["function"]["parameters"] == SCHEMA
    assert (request.stream, request.max_tokens) == (True, 5)


def decorate(value: Any, data: Any) -> Any:
    """A body in another form of the same meaning, as harnesses change theirs from call to call."""
    if isinstance(value, list):
        return [decorate(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    keys = data.draw(st.permutations(list(value)))
    new = {key: decorate(value[key], data) if key not in ("input_schema", "parameters") else value[key] for key in keys}
    if value.get("type") in ("text", "tool_result", "tool_use") and data.draw(st.booleans()):
        new["cache_control"] = {"type": "ephemeral"}
    if value.get("role") in ("user", "system") and isinstance(value.get("content"), str) and data.draw(st.booleans()):
        new["content"] = [{"type": "text", "text": value["content"]}]
    if value.get("type") == "tool_result" and data.draw(st.booleans()):
        new["content"] = "ok"
        new.pop("is_error", None)
    return new


@pytest.mark.parametrize(("dialect", "body"), DIALECTS)
@given(data=st.data())
@examples(25)
def test_forms_of_one_meaning_are_one_request(dialect: Dialect, body: Any, data: Any) -> None:
    """Pain 16: blocks or a string, cache marks, keys in another order, with or without `is_error`, streamed or not.

    Only the tools of chat are printed into the prompt as they come.
    """
    other = decorate(body, data) | {"stream": data.draw(st.booleans()), "max_tokens": 99}
    if isinstance(dialect, OpenAIChat):
        other["tools"] = body["tools"]
    one, two = dialect.parse(body, {}), dialect.parse(other, {})
    assert (one.messages, one.call) == (two.messages, two.call)
