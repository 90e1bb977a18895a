"""What holds for every chat format."""

from __future__ import annotations

from typing import get_args

import pytest

from server.schemas.runspec import Family, History
from trainer.capture.message import Message, ToolCall
from trainer.proxy.rendering import Rendering
from trainer.vocabulary import VISION, byte_level

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
