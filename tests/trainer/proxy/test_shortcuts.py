"""What makes rendering faster changes no token: texts that are stood in for, and turns whose ordinary tokens are left out."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from server.schemas.runspec import Family
from tests.support.examples import examples
from trainer.capture.message import Message, Role, ToolCall
from trainer.proxy import rendering
from trainer.proxy.moulds import Rendered
from trainer.proxy.rendering import Rendering, Tools
from trainer.vocabulary import SPECIALS, VISION, byte_level

TOKENIZER = byte_level(control=VISION)
RENDERINGS = {
    (family, thinking): Rendering(TOKENIZER, family=family, thinking=thinking) for family in get_args(Family) for thinking in (0, 1)
}
TEXT = st.builds(
    lambda pieces, times: "".join(pieces) * times, st.lists(st.sampled_from([*SPECIALS, "a b", "\n", "é", "<", "{"])), st.integers(1, 40)
)
SAMPLED = st.lists(st.sampled_from([TOKENIZER.token_to_id(name) for name in SPECIALS]) | st.integers(0, 255), max_size=60)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "tool"]), TEXT), min_size=1, max_size=4)


def both(made: Rendering, sampled: list[int], said: list[tuple[str, str]]) -> tuple[Rendered, Rendered | None]:
    start = [Message("system", "You fix code."), Message("user", "Fix it.")]
    new = [Message(role, text, tool_call_id="a" if role == "tool" else "") for role, text in said]  # type: ignore[arg-type]
    prompt = made.render(start, [])
    turn = Message("assistant", said[0][1], (ToolCall("a", "bash", {"command": said[0][1]}),), reasoning=said[0][1])
    return made._render([*start, turn, *new], []), made.bridge(prompt.ids[prompt.ends[-1] :], sampled, new, [])


@pytest.mark.parametrize("kind", RENDERINGS, ids=str)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sampled=SAMPLED, said=MESSAGES)
@example(sampled=[TOKENIZER.token_to_id("<|endoftext|>")] * 16 + [0], said=[("user", "")])  # an end, and an ordinary token behind it
@example(sampled=[*[0] * 20, TOKENIZER.token_to_id("<|im_end|>"), 0, *TOKENIZER.encode("\n").ids], said=[("user", "ok")])  # and a new line
def test_a_shortcut_gives_the_same_ids(kind: tuple[Family, int], sampled: list[int], said: list[tuple[str, str]]) -> None:
    quick = both(RENDERINGS[kind], sampled, said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "SHORT", 1 << 30)
        patch.setattr(rendering, "BEGINNING", 1 << 30)
        assert quick == both(RENDERINGS[kind], sampled, said)


def spelt(text: str) -> list[int]:
    """Character by character: a name of a special token is no such token."""
    return [token for character in text for token in TOKENIZER.encode(character, add_special_tokens=False).ids]


def turn(names: list[str]) -> list[int]:
    """Special tokens with ten characters before each of them."""
    return [token for name in names for token in (*spelt("some words"), TOKENIZER.token_to_id(name))]


SPOKEN = st.builds(
    lambda *texts: "".join(texts), *[st.sampled_from(["", " ", "\n\n", "\x1c", "\u3000"]), TEXT, st.sampled_from(["", "\t", "\xa0"])]
)


@pytest.mark.parametrize("kind", RENDERINGS, ids=str)
@given(
    sampled=st.builds(lambda names, bare: turn(names)[bare:], st.lists(st.sampled_from(SPECIALS), max_size=5), st.sampled_from([0, 10])),
    end=st.sampled_from(["<|im_end|>", "<|endoftext|>", ""]),
    said=st.lists(st.tuples(st.sampled_from(["user", "tool"]), SPOKEN), min_size=1, max_size=4),
    opened=st.booleans(),
    tools=st.sampled_from([[], [{"type": "function", "function": {"name": "bash", "description": "Run. " * 40, "parameters": {}}}]]),
)
@example(
    sampled=turn(["<tool_call>", "</tool_call>"]), end="<|im_end|>", said=[("tool", "ok"), ("tool", " <|im_end|> ")], opened=False, tools=[]
)
def test_a_mould_gives_the_ids_that_the_renderer_gives(
    kind: tuple[Family, int], sampled: list[int], end: str, said: list[tuple[Role, str]], opened: bool, tools: Tools
) -> None:
    made = RENDERINGS[kind]
    prompt = made.render([Message("user", "Fix it.")], [])
    scaffold = prompt.ids[prompt.ends[-1] :] + ([TOKENIZER.token_to_id("<think>")] if opened else [])
    ids, new = sampled + ([TOKENIZER.token_to_id(end)] if end else []), [Message(role, text) for role, text in said]
    drawn = made._draw(scaffold, ids, new, tools)
    assert made.bridge(scaffold, ids, new, tools) == (drawn.spelt_out(made._shield) if drawn else None)


@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("roles", [["tool"], ["tool", "tool", "user"], ["user"]])
def test_the_usual_turn_has_a_mould(family: Family, roles: list[Role]) -> None:
    """Else the test above would compare the renderer with itself."""
    made = RENDERINGS[family, 0]
    prompt = made.render([Message("user", "Fix it.")], [])
    messages = [Message(role, "ok") for role in roles]
    mould = made._mould(prompt.ids[prompt.ends[-1] :], turn(["<tool_call>", "</tool_call>", "<|im_end|>"]), messages)
    assert mould is not None and mould.filled(messages, made._shield) is not None


CALLS = st.sampled_from(
    [
        '{"name": "bash", "arguments": {"command": "ls"}}', '\n{"name": "bash"}\n', '{"name": "bash", "arguments": "ls"}',
        '{"name": "", "arguments": {}}', '{"name": 5}', '{"name": "bash", "arguments": NaN}', '{"name": "bash", "arguments": ["\\ud800"]}',
        '{"name": "\\ud800"}', '["bash"]', "[" * 60 + "]" * 60, '{"name": "bash", "arguments": ' + "[" * 60 + "]" * 60 + "}",
        '{"name": "bash", "arguments": 1' + "0" * 5000 + "}", "[" * 2_000, "no JSON", "", '{"name": "bash"} ',
    ]
)  # fmt: skip


@pytest.mark.parametrize("kind", RENDERINGS, ids=str)
@examples(150)
@given(
    said=st.text(max_size=20) | st.just("a </think> b"),
    call=st.none() | CALLS,
    behind=st.sampled_from(["", " more"]),
    marks=st.lists(st.sampled_from(SPECIALS), max_size=1),
    end=st.sampled_from(["<|im_end|>", "<|endoftext|>", ""]),
    opened=st.booleans(),
)
@example(said="Look.", call='{"name": "bash", "arguments": {"command": "ls"}}', behind="", marks=[], end="<|im_end|>", opened=False)
def test_the_usual_turn_says_what_the_renderer_reads(
    kind: tuple[Family, int], said: str, call: str | None, behind: str, marks: list[str], end: str, opened: bool
) -> None:
    made = RENDERINGS[kind]
    prompt = made.render([Message("user", "Fix it.")], [])
    scaffold = prompt.ids[prompt.ends[-1] :] + ([TOKENIZER.token_to_id("<think>")] if opened else [])
    block = [] if call is None else [TOKENIZER.token_to_id("<tool_call>"), *spelt(call), TOKENIZER.token_to_id("</tool_call>")]
    last = [TOKENIZER.token_to_id(end)] if end else []
    sampled = [*spelt(said), *(TOKENIZER.token_to_id(mark) for mark in marks), *block, *spelt(behind), *last]
    assert made._plain(scaffold, sampled) in (None, made._parse(scaffold, sampled, []))


def test_the_usual_turn_is_read_without_the_renderer() -> None:
    """Else the test above would compare nothing."""
    made = RENDERINGS["qwen3", 0]
    prompt = made.render([Message("user", "Fix it.")], [])
    block = [TOKENIZER.token_to_id("<tool_call>"), *spelt('{"name": "bash"}'), TOKENIZER.token_to_id("</tool_call>")]
    for body in ([], block):
        assert made._plain(prompt.ids[prompt.ends[-1] :], [*spelt("Look."), *body, TOKENIZER.token_to_id("<|im_end|>")]) is not None
