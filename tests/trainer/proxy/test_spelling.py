"""The table of byte-level tokens says what the tokenizer says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from trainer.proxy.spelling import Spelling
from trainer.vocabulary import SPECIALS, byte_level

BYTES = byte_level(merges=[("Ã", "©"), ("a", "b"), ("Ġ", "ab")])
BYTES.add_tokens([AddedToken("ein 語", normalized=False)])
PLAIN = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))


@given(st.lists(st.integers(0, BYTES.get_vocab_size() + 20), max_size=40))
def test_ids_are_spelt_as_the_tokenizer_spells_them(ids: list[int]) -> None:
    assert Spelling(BYTES).decode(ids) == BYTES.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=30))
def test_a_text_comes_back(text: str) -> None:
    assert Spelling(BYTES).decode(BYTES.encode(text, add_special_tokens=False).ids) == text


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_are_replaced_alike(raw: bytes) -> None:
    names = {byte: token for token in range(256) for byte in Spelling(BYTES)._table.__getitem__(token)}  # type: ignore[union-attr]
    ids = [names[byte] for byte in raw]
    assert Spelling(BYTES).decode(ids) == BYTES.decode(ids, skip_special_tokens=False) == raw.decode("utf-8", "replace")


def test_special_tokens_are_written_out_and_other_decoders_are_left_alone() -> None:
    assert Spelling(BYTES).decode([BYTES.token_to_id(name) for name in SPECIALS]) == "".join(SPECIALS)
    assert Spelling(PLAIN).decode([0, 1]) == PLAIN.decode([0, 1])
