"""Slots: the KV cache of sessions, with the routes of every cached position beside it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from .weights import Shape


class Slots:
    """`capacity` slots of `context` positions each. A slot belongs to one session and is idle or pinned by one running row.

    Invariant: position p < len(tokens[slot]) holds keys, values and routes of tokens[slot][p] behind tokens[slot][:p], all under the
    weights of today. An idle slot is kept until its session is released, the weights change, or it is the least recently used one
    when another session needs room. Memory is touched only as far as slots are used: a context of 200,000 tokens that nobody fills
    costs nothing.
    """

    def __init__(self, shape: Shape, capacity: int, context: int) -> None:
        size = (capacity, context, shape.kv_heads, shape.head_dim)
        self.context = context
        self.keys = [_untouched(size) for _ in range(shape.layers)]
        self.values = [_untouched(size) for _ in range(shape.layers)]
        kind = np.dtype(np.uint8 if shape.experts <= 256 else np.uint16)
        self.routes = np.zeros((capacity, context, shape.layers, shape.top_k), kind) if shape.experts else None
        self.tokens: list[list[int]] = [[] for _ in range(capacity)]
        self._written = [0] * capacity
        """Positions of each slot that may hold something; the rest are zeros. Brought up to date where `tokens` shrinks."""
        self._salts: list[str] = [""] * capacity
        self._free = list(reversed(range(capacity)))
        self._idle: dict[int, str] = {}  # in order of last use
        self._pinned: dict[int, str] = {}
        self.evicted = self.prompted = self.reused = 0

    def acquire(self, session: str, salt: str, prompt: Sequence[int]) -> int | None:
        """Pin a slot for `prompt` and cut it back to what it shares with the prompt; None while all slots are pinned.

        Only what was computed under the same `salt` is shared. At least the last
        prompt token is left to compute, because its logits are wanted.
        """
        for stale in [slot for slot, owner in self._idle.items() if owner == session and self._salts[slot] != salt]:
            del self._idle[stale]
            self._clear(stale)
        shared, slot = max(
            ((_common(self.tokens[slot], prompt), slot) for slot, owner in self._idle.items() if owner == session),
            default=(0, None),
        )
        if slot is None:
            if not self._free and not self._idle:
                return None
            slot = self._blank() if self._free else next(iter(self._idle))
            self.evicted += self._idle.get(slot, session) != session
        self._idle.pop(slot, None)
        self.prompted += len(prompt)
        self.reused += min(shared, len(prompt) - 1)
        self._pinned[slot], self._salts[slot] = session, salt
        self._note(slot)
        del self.tokens[slot][min(shared, len(prompt) - 1) :]
        return slot

    def unpin(self, slot: int) -> None:
        """The row that used `slot` ended; the slot stays with its session."""
        self._idle[slot] = self._pinned.pop(slot)

    def release(self, session: str) -> None:
        """Free the idle slots of a session."""
        for slot in [slot for slot, owner in self._idle.items() if owner == session]:
            del self._idle[slot]
            self._clear(slot)

    def drop(self) -> None:
        """Forget everything cached. No slot may be pinned."""
        if self._pinned:
            raise RuntimeError(f"{len(self._pinned)} slots are in use")
        for slot in list(self._idle):
            del self._idle[slot]
            self._clear(slot)

    @property
    def used(self) -> int:
        """Slots that belong to a session."""
        return len(self._idle) + len(self._pinned)

    def sessions(self) -> tuple[dict[str, int], dict[str, int]]:
        """(slots, tokens of the longest cached sequence) per session."""
        held: dict[str, int] = {}
        resident: dict[str, int] = {}
        for slot, session in (*self._idle.items(), *self._pinned.items()):
            held[session] = held.get(session, 0) + 1
            resident[session] = max(resident.get(session, 0), len(self.tokens[slot]))
        return held, resident

    def _blank(self) -> int:
        """A free slot, zeroed: rows of one batch read beyond their own length, masked, and a NaN left there would pass the mask."""
        slot = self._free.pop()
        for tensor in (*self.keys, *self.values):
            tensor[slot, : self._written[slot]].zero_()
        self._written[slot] = 0
        return slot

    def _note(self, slot: int) -> None:
        self._written[slot] = max(self._written[slot], len(self.tokens[slot]))

    def _clear(self, slot: int) -> None:
        self._note(slot)
        self.tokens[slot].clear()
        self._free.append(slot)


def _untouched(size: tuple[int, ...]) -> torch.Tensor:
    """fp32 zeros that take no memory until they are written, and then only their pages. (torch would write them all, and numpy asks for
    huge pages: 2 MB for the first token of every slot and layer.)"""
    pages = mmap.mmap(-1, math.prod(size) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).view(size)


def _common(cached: Sequence[int], prompt: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(cached, prompt, strict=False)):
        if a != b:
            return index
    return min(len(cached), len(prompt))
