"""A byte-level BPE with Qwen3's special tokens that needs no download. Every text has ids, and most texts have several sequences of
them: prompts use the merges, sampled turns are spelled byte by byte, so sampled text that is tokenised again shows as other ids.
"""

from __future__ import annotations

from tokenizers import Tokenizer, pre_tokenizers

from trainer.vocabulary import SPECIALS, byte_level

WORDS = (
    "system", "user", "assistant", "tools", "function", "name", "arguments", "description", "parameters", "properties", "type", "string",
    "object", "required", "command", "file", "path", "content", "text", "sha", "len", "list", "the", "Ġthe", "Ġto", "Ġand", "Ġof", "Ġa",
    "Ġin", "Ġis", "return", "Ġreturn", "calc", "bash", "Bash", "Read", "Edit", "read", "edit", "output", "error", "workspace", "Ċ", "Ġ",
)  # fmt: skip
"""In the byte-level alphabet, where Ġ is a space and Ċ a new line. Every prefix of a word is a token too."""


def make() -> Tokenizer:
    known, merges = set(pre_tokenizers.ByteLevel.alphabet()), []
    for word in WORDS:
        for end in range(1, len(word)):
            if word[: end + 1] not in known:
                known.add(word[: end + 1])
                merges.append((word[:end], word[end]))
    return byte_level(merges, split_words=True)


class Spelling:
    """Text to one id per byte: markup that is spelled inside a text stays text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special = {token: _known(tokenizer, token) for token in SPECIALS}
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        hidden = (chr(0x100 + i) for i in range(0x100))  # byte-level BPE gives the other bytes the characters from U+0100 on, in order
        chars = {byte: chr(byte) if byte in printable else next(hidden) for byte in range(0x100)}
        self._ids = {byte: _known(tokenizer, char) for byte, char in chars.items()}

    def ids(self, text: str) -> list[int]:
        """Every byte has an id; a lone surrogate becomes a question mark."""
        return [self._ids[byte] for byte in text.encode("utf-8", "replace")]


def _known(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return int(found)
