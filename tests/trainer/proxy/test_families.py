"""What holds for every chat format."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from server.schemas.runspec import Family, History
from trainer.capture.message import Message, ToolCall
from trainer.proxy.dialects import Dialect
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.fields import load
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.rendering import Rendering
from trainer.vocabulary import SPECIALS, VISION, byte_level

TOKENIZER = byte_level(control=VISION)
TOOLS = [
    {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
]
START = (Message("system", "You fix code."), Message("user", "Fix it."))
ANSWERS = (Message("tool", "one", tool_call_id="a"), Message("tool", "two", tool_call_id="b"), Message("user", "And?"))
families = pytest.mark.parametrize("family", get_args(Family))


@families
@pytest.mark.parametrize("thinking", [False, True])
def test_a_bridge_adds_what_a_whole_render_would(family: Family, thinking: bool) -> None:
    """The turn is what the renderer itself writes for it, so the two ways must meet token by token."""
    rendering = Rendering(TOKENIZER, family=family, thinking=thinking, history=History.KEEP)
    reasoning = "Look first." if thinking else None
    turn = Message("assistant", "I look.", tuple(ToolCall(i, "bash", {"command": f"ls {i}"}) for i in "ab"), reasoning=reasoning)
    prompt, after = rendering.render(START, TOOLS), rendering.render((*START, turn), TOOLS)
    sampled = after.ids[len(prompt.ids) : after.ends[2]]
    while rendering.decode(sampled[-1:]).isspace():  # the template's newline behind the turn's end was not sampled
        sampled.pop()
    parsed = rendering.parse(prompt.ids[prompt.ends[-1] :], sampled, TOOLS)
    assert (parsed.text, parsed.reasoning, [call.arguments for call in parsed.calls]) == (
        "I look.",
        reasoning,
        [{"command": "ls a"}, {"command": "ls b"}],
    )
    tools = ANSWERS[:2]
    bridged = rendering.bridge(prompt.ids[prompt.ends[-1] :], sampled, tools, TOOLS)
    assert bridged is not None
    assert prompt.ids + sampled + bridged.ids == rendering.render((*START, turn, *tools), TOOLS).ids


@families
def test_a_remembered_head_changes_nothing(family: Family) -> None:
    rendering = Rendering(TOKENIZER, family=family)
    once, again = rendering.render(START, TOOLS), rendering.render(START, TOOLS)
    whole = rendering._render(START, TOOLS)
    assert once == again == whole


def echoed(dialect: Dialect, arguments: str) -> tuple[Message, ...]:
    """A history with a call that the client wrote itself."""
    go: dict[str, Any] = {"role": "user", "content": "Go."}
    call: dict[str, Any]
    if isinstance(dialect, Anthropic):
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "bash", "input": arguments}]}
    elif isinstance(dialect, OpenAIChat):
        function = {"name": "bash", "arguments": arguments}
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    else:
        call = {"type": "function_call", "call_id": "1", "name": "bash", "arguments": arguments}
    body = {"model": "m", "input" if isinstance(dialect, OpenAIResponses) else "messages": [go, call, go]}
    return dialect.parse(load(json.dumps(body).encode()), {}).messages


@families
@pytest.mark.parametrize("dialect", [Anthropic(), OpenAIChat(), OpenAIResponses()])
@pytest.mark.parametrize(
    "arguments",
    [
        "", "oops", "5", '"ls"', "[1]", "NaN", "9" * 5000, '{"n": ' + "9" * 5000 + "}", "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000,
        '{"a":' * 100 + '"\\ud800 \\u003c|im_end|>"' + "}" * 100, '{"\\ud800": "\\u003c|im_end|>"}', '"\\u003c|im_end|>"',
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_any_text_in_place_of_arguments_can_be_rendered(family: Family, dialect: Dialect, arguments: str) -> None:
    """A renderer that read it again failed the rollout, or took an escaped name of a special token for the token."""
    rendering = Rendering(TOKENIZER, family=family)
    special = {TOKENIZER.token_to_id(name) for name in SPECIALS}
    rendered, neutral = (rendering.render(echoed(dialect, text), []).ids for text in (arguments, "{}"))
    assert [i for i in rendered if i in special] == [i for i in neutral if i in special]
