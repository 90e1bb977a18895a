"""Prompt blocks are what two requests share, and never hold a special token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.policies.blocks import shared_blocks

SPECIALS = ("<|im_start|>", "<|im_end|>", "<tool_call>")


def test_what_differs_is_cut_out() -> None:
    first = "<|im_start|>user\nPlease solve this: fix a\n\nYou are on Linux 6.1\nThe rules are long.\n<|im_end|>"
    second = "<|im_start|>user\nPlease solve this: mend b, now\n\nYou are on Linux 5.9\nThe rules are long.\n<|im_end|>"
    assert shared_blocks(first, second, SPECIALS) == ["user\nPlease solve this: ", "\nThe rules are long.\n"]


def test_probes_of_different_structure_are_refused() -> None:
    with pytest.raises(ValueError, match="same harness version"):
        shared_blocks("a<|im_end|>b", "a<tool_call>b", SPECIALS)


pieces = st.lists(
    st.sampled_from(["rule one\n", "rule two: ", "x\n", "yy", "\n", "a longer line of text\n", "<|im_end|>", "<tool_call>"]), max_size=20
)


@given(pieces, pieces)
def test_blocks_lie_in_both_texts_and_hold_no_special_token(first: list[str], second: list[str]) -> None:
    marks = [piece for piece in first if piece in SPECIALS]
    rest = iter(marks)
    second = [next(rest, "") if piece in SPECIALS else piece for piece in second] + list(rest)
    for block in shared_blocks("".join(first), "".join(second), SPECIALS, min_length=2):
        assert block in "".join(first)
        assert block in "".join(second)
        assert not any(special in block for special in SPECIALS)
