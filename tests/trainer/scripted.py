"""An engine that answers from a script and remembers what it was asked: a real implementation of `Engine`, only without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from trainer.engine.base import Generation, GenerationRequest, Sampling, StopReason

LAYERS, TOP_K, EXPERTS = 2, 3, 16
ABORT = "abort"
Part = str | Exception | asyncio.Event
"""Of a streamed turn: text, a fault, or something to wait for."""


@dataclass(frozen=True)
class Call:
    """One call as the engine saw it, and what it answered."""

    session: str
    prompt: list[int]
    sampling: Sampling
    routes_from: int
    sampled: list[int]
    log_probs: list[float]
    version: int
    salt: str = ""


@dataclass
class ScriptedEngine:
    """`script` holds sampled texts (with special tokens spelled out) or exceptions, taken in order. A list of parts is streamed one by
    one; a part that says `ABORT` returns what there is as aborted.

    Routes of a position are a function of the token there and the position, so a test can tell a shifted row. `gate`, when set, holds
    every call until it is opened.
    """

    tokenizer: Tokenizer
    script: list[str | Exception | Sequence[Part]] = field(default_factory=list)
    stop: StopReason = "stop"
    version: int = 0
    routes: bool = True
    gate: asyncio.Event | None = None
    calls: list[Call] = field(default_factory=list)
    started: int = 0
    cancelled: int = 0
    released: list[str] = field(default_factory=list)
    write: Callable[[], str] | None = None
    """Makes the next text when the script is empty."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.started, first = self.started + 1, request.routes_from
        await self._until(self.gate)
        text = self.script.pop(0) if self.script or self.write is None else self.write()
        if isinstance(text, Exception):
            raise text
        number, prompt, parts = self.started, list(request.prompt_ids), [text] if isinstance(text, str) else text
        stop: StopReason = self.stop
        ids: list[int] = []
        log_probs: list[float] = []
        for part in parts:
            if part == ABORT:
                stop = "aborted"
                break
            if isinstance(part, Exception):
                raise part
            if isinstance(part, asyncio.Event):
                await self._until(part)
                continue
            new = self.tokenizer.encode(part, add_special_tokens=False).ids
            if len(ids) + len(new) > request.sampling.max_tokens:
                new, stop = new[: request.sampling.max_tokens - len(ids)], "length"
            fresh = [-0.01 * (1 + (number * 31 + len(ids) + i) % 97) for i in range(len(new))]
            ids, log_probs = ids + new, log_probs + fresh
            if request.on_tokens is not None and parts is text:
                request.on_tokens(new, fresh)
        self.calls.append(Call(request.session, prompt, request.sampling, first, ids, log_probs, self.version, request.salt))
        whole = [*prompt, *ids]
        rows = routes_at(np.array(whole[first:-1]), np.arange(first, len(whole) - 1)) if self.routes else None
        return Generation(ids, log_probs, rows, stop, self.version)

    async def _until(self, event: asyncio.Event | None) -> None:
        try:
            if event is not None:
                await event.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def release(self, session: str) -> None:
        self.released.append(session)


def routes_at(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n, layers, top_k]"""
    base = np.arange(LAYERS * TOP_K).reshape(1, LAYERS, TOP_K)
    return ((base + (7 * tokens + 3 * positions)[:, None, None]) % EXPERTS).astype(np.uint8)


def call(name: str, text: str = "", **arguments: Any) -> str:
    """A well-formed sampled turn with one tool call."""
    return calls((name, arguments), text=text)


def calls(*many: tuple[str, Any], text: str = "") -> str:
    blocks = ["<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>" for name, arguments in many]
    return "\n".join([*([text] if text else []), *blocks]) + "<|im_end|>"


def say(text: str) -> str:
    return text + "<|im_end|>"
