"""Special tokens belong to the chat template alone: their names in a client's text are encoded as ordinary characters.

A renderer joins its own words and the client's before it encodes them, so the client's text is covered first: a mark is put inside
every name of a special token, and the encoder breaks the text there instead of reading the name. Text without such a name is encoded
exactly as before.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer

from trainer.proxy.words import Words

_MARK, _SELF, _BREAK = "\ufdd0", "\ufdd0\ufdd1", "\ufdd0\ufdd2"
"""Two noncharacters of Unicode, which are allowed in text: a mark that the client wrote becomes `_SELF`."""


class Shield:
    def __init__(self, tokenizer: Tokenizer) -> None:
        """Names are those of special tokens and of added tokens in angle brackets, such as Qwen's `<tool_call>`."""
        self._words = Words(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        names = [token.content for token in added if token.special or re.fullmatch(r"<[^<>\s]+>", token.content)]
        either = "|".join(re.escape(name) for name in names if len(name) > 1)
        self._found = re.compile(f"{either}|{_MARK}")
        self._first = re.compile(f"{_MARK}|(?={either})." if either else _MARK, re.DOTALL)  # a lookahead: names may overlap

    def cover(self, value: Any) -> Any:
        """A JSON value with every string covered; strings without a name are the same objects."""
        if isinstance(value, str):
            return self._first.sub(_broken, value) if self._found.search(value) else value
        if isinstance(value, dict):
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        return [self.cover(item) for item in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Ids of covered text mixed with the template's own words."""
        if _MARK not in text:
            return self._words.encode(text)
        return [token for piece in text.split(_BREAK) for token in self._words.encode(piece.replace(_SELF, _MARK))]


def _broken(match: re.Match[str]) -> str:
    return _SELF if match[0] == _MARK else match[0] + _BREAK
