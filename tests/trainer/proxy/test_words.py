"""Ids put together word by word are the tokenizer's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.examples import examples
from trainer.proxy import words
from trainer.proxy.words import Words
from trainer.vocabulary import add_specials

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = "def solve(path):\n    return open(path).read().strip()  # don't\n\n  x1 = 42\r\n'll IT'S <tool_call>\n{}\n</tool_call>"


def tokenizer(split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    made.train_from_iterator([CORPUS], trainer)
    add_specials(made)
    return made


def qwen() -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), level]))
    made.normalizer = normalizers.NFC()
    return made


MADE = {"byte level": tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)), "qwen": qwen()}
WORDS = {name: Words(made) for name, made in MADE.items()}
PIECES = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x00", "\x7f", "a", "B", "path", "7", "42", "'s", "'T", "_", "-", "(", "é", "ſ", "'ſ",
     "\u2028", "字", "<", "<|", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "<tool_call", "<|endoftext|>"]
)  # fmt: skip


@pytest.mark.parametrize("name", MADE)
@examples(300)
@given(pieces=st.lists(PIECES, max_size=24))
def test_the_ids_are_those_of_the_tokenizer(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = MADE[name].encode(text, add_special_tokens=False).ids
    assert WORDS[name].encode(text) == whole
    assert WORDS[name].encode(text) == whole  # and so they are once every word is known


@pytest.mark.parametrize("name", MADE)
def test_both_ways_of_splitting_are_understood(name: str) -> None:
    assert Words(MADE[name])._word is not None


def test_a_text_of_new_words_is_read_as_a_whole_and_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST_KNOWN", 300)
    made = Words(MADE["qwen"])
    for start in range(0, 4_000, 500):
        text = " ".join(f"w{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}" for i in range(start, start + 500))
        assert made.encode(text) == MADE["qwen"].encode(text).ids
        assert len(made._known) <= 300


def test_a_tokenizer_that_splits_otherwise_is_left_to_itself() -> None:
    other = tokenizer(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    assert Words(other)._word is None
    assert Words(other).encode(CORPUS) == other.encode(CORPUS, add_special_tokens=False).ids
