"""Sampled ids to text, as a byte-level tokenizer decodes them, by one look at a table for each: answers wait for this."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders


class Spelling:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = _Table(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are written out; bytes that are no text become U+FFFD."""
        if self._table is None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return b"".join(map(self._table.__getitem__, ids)).decode("utf-8", "replace")


class _Table(dict[int, bytes]):
    """An id that is none has no bytes; a token of other characters than those that stand for bytes is written as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer, self._bytes = tokenizer, alphabet()

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        known = all(character in self._bytes for character in text)
        self[token] = spelt = bytes(self._bytes[character] for character in text) if known else text.encode()
        return spelt


def alphabet() -> dict[str, int]:
    """Characters of GPT-2's byte-level alphabet: a byte that is printable in Latin-1 is itself, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
