"""Token ids of ASCII text, put together from those of its words: tool output is made of words that were seen before, and a lookup costs
a fifth of what the tokenizer takes to split the text again.

A byte-level tokenizer cuts text into words by a pattern before its model sees it, so the ids of a text are those of its words. The pattern
is the tokenizer's own. Text that is not ASCII, and tokenizers that are made otherwise, go the tokenizer's way.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable

from tokenizers import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by when it is not told otherwise."""
ASCII = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}
MOST_KNOWN = 65_536
LONGEST = 64
"""Characters of a word that is remembered."""
MOST_NEW = 256
"""Words that one text may teach; a text with more is quicker read as a whole."""
PROBE = "It's  a1 <x>\n\n\tif(x_y == 42):\r\n    don'T 'll  \x0b\x1c~~\n \n"


class Words:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = _Known(self._whole)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: _raw([number]) for number, token in added.items()}
        names = "|".join(re.escape(name) for name in sorted(self._added, key=len, reverse=True))
        self._split = re.compile(f"({names})" if names else r"(?!)()")
        plain = all(not (token.lstrip or token.rstrip or token.single_word or token.normalized) for token in added.values())
        self._word = _pattern(tokenizer) if plain else None
        if self._word is not None and self._by_words(PROBE) != self._whole(PROBE):
            self._word = None

    def encode(self, text: str) -> list[int]:
        """The ids that the tokenizer gives, names of special tokens included."""
        if self._word is None or not text.isascii():
            return self._whole(text)
        return self._by_words(text)

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _by_words(self, text: str) -> list[int]:
        assert self._word is not None  # noqa: S101 asked before
        known, found = self._known, list[bytes]()
        try:
            for i, piece in enumerate(self._split.split(text)):
                found.append(self._added[piece] if i % 2 else b"".join(map(known.__getitem__, self._word.findall(piece))))
            return array("i", b"".join(found)).tolist()
        except _TooManyNew:
            return self._whole(text)
        finally:
            known.settle()


class _TooManyNew(Exception):
    """A text is quicker read as a whole."""


class _Known(dict[str, bytes]):
    """Words to ids, as int32: a list would cost three steps through cold memory for each word, this costs one."""

    def __init__(self, whole: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._whole, self._new = whole, list[str]()

    def __missing__(self, word: str) -> bytes:
        self._new.append(word)
        if len(self._new) > MOST_NEW:
            raise _TooManyNew
        self[word] = ids = _raw(self._whole(word))
        return ids

    def settle(self) -> None:
        """A text is over: long words are forgotten, and everything when that is too much."""
        for word in self._new:
            if len(word) > LONGEST:
                self.pop(word, None)
        self._new.clear()
        if len(self) > MOST_KNOWN:
            self.clear()


def _raw(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """How the tokenizer splits ASCII text; None when it is made in a way that is not known here."""
    if tokenizer.truncation or tokenizer.padding or tokenizer.pre_tokenizer is None:
        return None
    normalizer = json.loads(tokenizer.normalizer.__getstate__())["type"] if tokenizer.normalizer else "NFC"
    match json.loads(tokenizer.pre_tokenizer.__getstate__()):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            pattern = GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            pass
        case _:
            return None
    try:
        return re.compile(_in_ascii(pattern), re.ASCII) if normalizer == "NFC" else None  # which leaves ASCII as it is
    except re.error:
        return None


def _in_ascii(pattern: str) -> str:
    """Letters and digits spelt out, in a set or as a set of their own."""

    def spell(match: re.Match[str]) -> str:
        found = match[0]
        if found in ASCII:
            return f"[{ASCII[found]}]"
        for name, characters in ASCII.items():
            found = found.replace(name, characters)
        return found

    return re.sub(r"\[(?:[^\]\\]|\\.)*\]|\\p\{[LN]\}", spell, pattern)
