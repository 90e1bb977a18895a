"""Recorded ids → ids that the proxy minted, wherever a harness quotes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from trainer.replay.answers import Answer
from trainer.replay.recording import Block, Exchange, is_turn, mention
from trainer.replay.turns import usable

ITEMS = {"thinking": ("reasoning",), "text": ("message",), "call": ("function_call", "custom_tool_call")}


class Ids:
    """The same id may have been recorded for several turns, some of them older than the recording: a resumed session can mint ids that
    its history has. Which turn is meant is told by how many turns before it have the id.
    """

    def __init__(self) -> None:
        self._minted: dict[str, dict[int, str]] = {}
        """Recorded id → number of earlier turns with it in the same history → minted id."""

    def learn(self, exchange: Exchange, blocks: tuple[Block, ...], answer: Answer) -> None:
        """Take the ids of an answer; calls that were delivered as text get none."""
        earlier = self._turns_with({name for block in blocks for name in (block.id, block.item) if name}, exchange.messages)
        calls = [block for block in blocks if block.kind == "call" and usable(block)]
        for block, (minted, _, _) in zip(calls, answer.calls, strict=False):
            if block.id:
                self._minted.setdefault(block.id, {})[earlier.get(block.id, 0)] = minted
                earlier[block.id] = earlier.get(block.id, 0) + 1
        items = list(answer.items)
        for block in blocks:
            here = next((n for n, (kind, _) in enumerate(items) if kind in ITEMS[block.kind]), None)
            if block.item and here is not None and (block.kind != "call" or usable(block)):
                self._minted.setdefault(block.item, {})[earlier.get(block.item, 0)] = items.pop(here)[1]

    def translate(self, exchange: Exchange) -> Any:
        """The request's body with minted ids; what is not translated is shared with the recording."""
        body, key = exchange.body, "messages" if "messages" in exchange.body else "input"
        if not isinstance(body.get(key), list):
            return body
        pattern, seen = _any(self._minted), dict[str, int]()
        return {**body, key: [self._message(message, pattern, seen) for message in body[key]]}

    def _message(self, message: Any, pattern: re.Pattern[str], seen: dict[str, int]) -> Any:

        def minted(match: re.Match[str]) -> str:
            """In a turn, each mention is the next call of that id; elsewhere, the last call is meant, or the only one."""
            known, number = self._minted[match[0]], seen.get(match[0], 0)
            if turn:
                seen[match[0]] = number + 1
            elif number:
                number -= 1
            else:
                number = min(known)
            return known.get(number, match[0])

        turn = is_turn(message)
        return json.loads(pattern.sub(minted, json.dumps(message)))

    def _turns_with(self, ids: Iterable[str], messages: Iterable[Any]) -> dict[str, int]:
        pattern, counts = _any(ids), dict[str, int]()
        for message in messages:
            if is_turn(message):
                for found in pattern.findall(json.dumps(message)):
                    counts[found] = counts.get(found, 0) + 1
        return counts


def _any(ids: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(mention(recorded) for recorded in ids) or "(?!)")
