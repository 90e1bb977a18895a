"""The tokenizer is lossless on any text, and Qwen3's special tokens are one id each with Qwen3's flags."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trainer.policies.conversations import HARNESSES
from trainer.policies.demonstrations import Task
from trainer.policies.remake import vocabulary
from trainer.policies.tokenizer import bootstrap, build
from trainer.vocabulary import CONTROL, SPECIALS

SMALL = build(["def area(w, h):\n    return w + h\n"] * 3, ["\n\nA block of text\n", ".py", "def "], vocab_size=300)

AWKWARD = [*SPECIALS, "\n\nA block of text\n", "\n\n", "def ", " \t\r\n", "é漢🙂", "//", "0x1F", "\\u003c"]
awkward = st.lists(st.one_of(st.text(), st.sampled_from(AWKWARD)), max_size=12).map("".join)


@given(awkward)
def test_lossless(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@given(awkward)
def test_bootstrap_is_lossless_too(text: str) -> None:
    plain = bootstrap()
    assert plain.decode(plain.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_specials_are_atomic_and_no_other_token_contains_one(harness: str, tasks: list[Task]) -> None:
    made = vocabulary([HARNESSES[harness]()], tasks, random.Random(0))
    for special in SPECIALS:
        assert made.encode(special, add_special_tokens=False).ids == [made.token_to_id(special)]
    assert not [token for token in made.get_vocab() if token not in SPECIALS and any(special in token for special in SPECIALS)]
    flagged = {token.content for token in made.get_added_tokens_decoder().values() if token.special}
    assert flagged == set(CONTROL)


def test_a_name_is_one_token_wherever_it_stands(tasks: list[Task]) -> None:
    made: Tokenizer = vocabulary([HARNESSES["mini-swe-agent"]()], tasks * 5, random.Random(0))
    for task in tasks:
        assert len(made.encode(task.function, add_special_tokens=False).ids) == 1


def test_a_block_with_a_special_token_is_refused() -> None:
    with pytest.raises(ValueError, match="special token"):
        build([], ["text <tool_call> text"])
