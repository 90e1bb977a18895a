"""Recorded ids → ids that the proxy minted, wherever a harness quotes them."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from trainer.replay.answers import Answer
from trainer.replay.recording import Block, Exchange, mention
from trainer.replay.turns import usable

ITEMS = {"thinking": ("reasoning",), "text": ("message",), "call": ("function_call", "custom_tool_call")}


class Ids:
    """A recorded id may have been sampled more than once; its n-th call in a history is then the n-th that was sampled."""

    def __init__(self) -> None:
        self._minted: dict[str, list[str]] = {}

    def learn(self, blocks: tuple[Block, ...], answer: Answer) -> None:
        """Take the ids of an answer; calls that were delivered as text get none."""
        calls = [block for block in blocks if block.kind == "call" and usable(block)]
        for block, (minted, _, _) in zip(calls, answer.calls, strict=False):
            if block.id:
                self._minted.setdefault(block.id, []).append(minted)
        items = list(answer.items)
        for block in blocks:
            here = next((n for n, (kind, _) in enumerate(items) if kind in ITEMS[block.kind]), None)
            if block.item and here is not None and (block.kind != "call" or usable(block)):
                self._minted.setdefault(block.item, []).append(items.pop(here)[1])

    def translate(self, exchange: Exchange) -> Any:
        """The request's body with minted ids."""
        body = copy.deepcopy(exchange.body)
        key = "messages" if "messages" in body else "input"
        seen: dict[str, int] = {}
        if isinstance(body.get(key), list):
            body[key] = [self._message(message, seen) for message in body[key]]
        return json.loads(self._replace(json.dumps(body), {}))

    def _message(self, message: Any, seen: dict[str, int]) -> Any:
        text = json.dumps(message)
        calls = isinstance(message, dict) and (message.get("role") == "assistant" or message.get("type") in ITEMS["call"])
        if calls:
            for recorded in {match[0] for match in self._pattern().finditer(text)}:
                seen[recorded] = seen.get(recorded, 0) + 1
        return json.loads(self._replace(text, seen))

    def _replace(self, text: str, seen: dict[str, int]) -> str:
        def minted(match: re.Match[str]) -> str:
            known = self._minted[match[0]]
            return known[min(max(seen.get(match[0], 1), 1), len(known)) - 1]

        return self._pattern().sub(minted, text) if self._minted else text

    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(mention(recorded) for recorded in self._minted) or "(?!)")
