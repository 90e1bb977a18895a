"""Whatever a client writes, the special tokens of a prompt are those of the chat template."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

import trainer.policies
from tests.support.examples import examples
from trainer.capture.message import Message, ToolCall
from trainer.proxy.literal import Shield
from trainer.proxy.rendering import Rendering
from trainer.vocabulary import CONTROL, MARKUP, VISION, byte_level

MERGED = Tokenizer.from_file(str(Path(trainer.policies.__file__).parent / "onebug-claude-code" / "tokenizer.json"))
RENDERINGS = [Rendering(byte_level()), Rendering(MERGED), Rendering(byte_level(control=VISION), family="qwen3.5")]
PIECES = [*CONTROL, *MARKUP, "<", "|im_end", "|>", "tool_call>", "</", "\ufdd0", "\ufdd1", "\ufdd2", "\n", " ", "é", "x = 1"]
texts = (
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=12)
    .map("".join)
    .map(lambda text: text.encode("utf-8", "ignore").decode())
)


def special(rendering: Rendering, ids: list[int]) -> Counter[str]:
    names = {rendering._spelling._tokenizer.token_to_id(name): name for name in (*CONTROL, *MARKUP)}
    return Counter(names[i] for i in ids if i in names)


def conversation(*said: str) -> list[Message]:
    system, user, thought, text, argument, answer = said
    call = ToolCall("1", "Bash", {argument: [argument]})
    return [
        Message("system", system), Message("user", user), Message("assistant", text, (call,), reasoning=thought),
        Message("tool", answer, tool_call_id="1"), Message("tool", answer, tool_call_id="2"),
    ]  # fmt: skip


def tools(text: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "Bash", "description": text, "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("rendering", RENDERINGS)
@given(said=st.lists(texts, min_size=6, max_size=6), about=texts)
@examples(40)
def test_no_text_of_a_client_becomes_a_special_token(rendering: Rendering, said: list[str], about: str) -> None:
    rendered = rendering.render(conversation(*(f"a{text}a" for text in said)), tools(about)).ids
    neutral = rendering.render(conversation(*["a"] * 6), tools("")).ids
    assert special(rendering, rendered) == special(rendering, neutral)
    text = rendering.decode(rendered)
    assert all(f"a{piece}a" in text for piece in (*said[:4], said[5]))


@pytest.mark.parametrize("rendering", RENDERINGS)
@given(text=texts)
@examples(40)
def test_a_bridge_is_as_safe_as_a_render(rendering: Rendering, text: str) -> None:
    start = rendering.render([Message("user", "Go.")], [])
    sampled = [*rendering._spelling._tokenizer.encode("Yes.").ids, *rendering.stop_token_ids[:1]]
    new = [Message("tool", f"a{text}a", tool_call_id="1"), Message("user", f"b{text}b")]
    bridged = rendering.bridge(start.ids[start.ends[-1] :], sampled, new, [])
    whole = rendering.render([Message("user", "Go."), Message("assistant", "Yes."), *new], [])
    assert bridged is not None
    assert whole.ids[-len(bridged.ids) :] == bridged.ids


@pytest.mark.parametrize("tokenizer", [byte_level(), MERGED])
@given(text=st.text())
@examples(40)
def test_ordinary_text_is_encoded_as_ever(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    if not any(name in text for name in (*CONTROL, *MARKUP, "\ufdd0")):
        shield = Shield(tokenizer)
        assert shield.cover(text) is text
        assert shield.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_names_that_overlap_are_all_broken() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("[AB", special=True), AddedToken("BC]", special=True)])
    shield = Shield(tokenizer)
    assert tokenizer.encode("[ABC]").ids != tokenizer.encode("[").ids + tokenizer.encode("ABC]").ids
    assert max(shield.encode(shield.cover("[ABC]"))) < 256
