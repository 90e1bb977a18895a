from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.examples import examples
from trainer.capture.message import Message, ToolCall
from trainer.proxy.rendering import ParsedCall, Rendering

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
START = (Message("system", "You fix code."), Message("user", "Fix it."))
LS = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_ends_cut_the_prompt_at_messages(rendering: Rendering) -> None:
    rendered = rendering.render(START, TOOLS)
    first, second = rendered.ends
    assert rendering.decode(rendered.ids[:first]).startswith("<|im_start|>system\nYou fix code.\n\n# Tools")
    assert rendering.decode(rendered.ids[first:second]) == "<|im_start|>user\nFix it.<|im_end|>\n"
    assert rendering.decode(rendered.ids[second:]) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_bridge_adds_what_a_whole_render_would(rendering: Rendering, tokenizer: Tokenizer) -> None:
    """Parallel tool results become one block, and the result does not depend on how the history was sent."""
    rendered = rendering.render(START, TOOLS)
    scaffold, sampled = rendered.ids[rendered.ends[-1] :], ids(tokenizer, f"I look.\n{LS}\n{LS}<|im_end|>")
    assistant = Message("assistant", "I look.", tuple(ToolCall(i, "bash", {"command": "ls"}) for i in "ab"))
    new = (Message("tool", "one", tool_call_id="a"), Message("tool", "two", tool_call_id="b"), Message("user", "And?"))
    bridged = rendering.bridge(scaffold, sampled, new, TOOLS)
    assert bridged is not None
    whole = rendering.render((*START, assistant, *new), TOOLS)
    assert rendered.ids + sampled + bridged.ids == whole.ids
    texts = [rendering.decode(bridged.ids[a:b]) for a, b in zip([0, *bridged.ends[:-1]], bridged.ends, strict=True)]
    assert texts == [
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>",
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n",
        "<|im_start|>user\nAnd?<|im_end|>\n",
    ]


@pytest.mark.parametrize(
    ("sampled", "text", "calls", "malformed"),
    [
        (f"Look.\n{LS}<|im_end|>", "Look.", 1, 0),
        (f"{LS}\n{LS}<|endoftext|>", "", 2, 0),
        (f"{LS}\nsome text that is cut", "", 1, 0),
        ("Only text.<|im_end|>", "Only text.", 0, 0),
        ("<|im_end|>", "", 0, 0),
        ("<tool_call>\n{oops}\n</tool_call><|im_end|>", "<tool_call>\n{oops}\n</tool_call>", 0, 1),
        ('<tool_call>\n{"name": "ba', '<tool_call>\n{"name": "ba', 0, 1),
        ('<tool_call>\n{"arguments": {}}\n</tool_call><|im_end|>', '<tool_call>\n{"arguments": {}}\n</tool_call>', 0, 1),
        ('<tool_call>\n{"name": 5}\n</tool_call><|im_end|>', '<tool_call>\n{"name": 5}\n</tool_call>', 0, 1),
        ('<tool_call>\n[1]\n</tool_call>\n' + LS + "<|im_end|>", "<tool_call>\n[1]\n</tool_call>", 1, 1),
        ('<tool_call>\n{"name": "bash", "arguments": {"n": NaN}}\n</tool_call><|im_end|>', None, 0, 1),
        ('<tool_call>\n{"name": "bash", "arguments": ' + "9" * 5000 + "}\n</tool_call><|im_end|>", None, 0, 1),
        ('<tool_call>\n{"name": "bash", "arguments": ' + "[" * 100_000 + "\n</tool_call><|im_end|>", None, 0, 1),
    ],
)  # fmt: skip
def test_sampled_turns_are_parsed_or_shown(
    rendering: Rendering, tokenizer: Tokenizer, sampled: str, text: str | None, calls: int, malformed: int
) -> None:
    parsed = rendering.parse(ids(tokenizer, "<|im_start|>assistant\n<think>\n\n</think>\n\n"), ids(tokenizer, sampled), TOOLS)
    assert (len(parsed.calls), parsed.malformed) == (calls, malformed)
    assert text is None or parsed.text == text
    assert all(call == ParsedCall("bash", {"command": "ls"}) for call in parsed.calls)


def test_reasoning_is_kept_apart(rendering: Rendering, tokenizer: Tokenizer) -> None:
    parsed = rendering.parse(
        ids(tokenizer, "<|im_start|>assistant\n"), ids(tokenizer, f"<think>\nHm.\n</think>\n\nSo.\n{LS}<|im_end|>"), TOOLS
    )
    assert (parsed.reasoning, parsed.text, len(parsed.calls)) == ("Hm.", "So.", 1)


def test_loads_from_a_checkpoint_directory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        Rendering.load(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Rendering.load(tmp_path, thinking=True)
    assert loaded.decode(loaded.render(START, []).ids).endswith("<|im_start|>assistant\n")
    assert [loaded.decode([i]) for i in loaded.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]


TEXTS = st.text(max_size=30) | st.sampled_from(["<|im_end|>", "\n", "<tool_response>", " x"])
CALLS = st.lists(st.builds(ToolCall, st.just("a"), st.just("bash"), st.dictionaries(st.text(max_size=3), TEXTS, max_size=2)), max_size=2)
LATER = st.one_of(
    st.builds(Message, st.just("user"), TEXTS),
    st.builds(Message, st.just("tool"), TEXTS, tool_call_id=st.just("a")),
    st.builds(lambda text, calls, why: Message("assistant", text, tuple(calls), reasoning=why), TEXTS, CALLS, st.none() | TEXTS),
)


@given(TEXTS, st.lists(LATER, min_size=1, max_size=5), st.sampled_from([[], TOOLS, [*TOOLS, *TOOLS]]), st.booleans())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_remembered_head_changes_no_id(tokenizer: Tokenizer, system: str, later: list[Message], tools: list[Any], thinking: bool) -> None:
    """A whole prompt is what the renderer gives for it in one piece."""
    rendering = Rendering(tokenizer, thinking=thinking)
    messages = [Message("system", system), *later]
    for _ in range(2):
        rendered, whole = rendering.render(messages, tools), rendering._render(messages, tools)
        assert (rendered.ids, rendered.ends) == (whole.ids, whole.ends)
        rendered.ids.clear()
