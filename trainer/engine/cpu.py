"""A batched CPU engine for small Qwen3 and Qwen3-MoE policies: continuous batching, KV reuse over the turns of a session, routes.

All work happens on the event loop that calls `generate`, which gets its turn between two forward passes: 1 ms to 10 ms for the demo
policy. A worker thread would wake the loop sooner but takes the same CPU time, the two sharing one interpreter lock, and cancelling
or swapping weights in the middle of a pass would need locks of its own. Run torch with one thread.
"""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from .base import KV, EngineError, Generation, GenerationRequest, Sampling, StopReason
from .cache import Slots
from .forward import Policy
from .sampling import draw
from .weights import Shape, read_checkpoint

_PREFILL_TOKENS = 512
"""Most prompt tokens taken into one iteration (but at least one request): it bounds how long the loop is held."""


@dataclass(slots=True, eq=False)
class _Row:
    """One request. `slot` is None until it is admitted."""

    request: GenerationRequest
    prompt: list[int]
    random: random.Random
    answer: asyncio.Future[Generation]
    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class CpuEngine:
    """Implements `Engine`. Not thread-safe: one event loop at a time.

    `slots` bounds both how many sessions keep their KV and how many requests run at once. Draws are decided by `seed`, the session's
    name and the number of requests the session made before: who else is served at the time does not matter.
    """

    def __init__(self, shape: Shape, named: Mapping[str, Tensor], *, context: int, slots: int = 128, seed: int = 0) -> None:
        self._policy = Policy(shape, named, context)
        self._cache = Slots(shape, slots, context)
        self._seed, self._name = seed, uuid.uuid4().hex
        self._requests: dict[str, int] = {}
        self._waiting: list[_Row] = []
        self._active: list[_Row] = []
        self._worker: asyncio.Task[None] | None = None
        self.version = 0

    @classmethod
    def from_checkpoint(cls, path: Path, *, context: int, slots: int = 128, seed: int = 0) -> CpuEngine:
        """Engine for a HF checkpoint directory. Raises ValueError for a model it does not support."""
        config, named = read_checkpoint(path)
        return cls(Shape.from_hf(config), named, context=context, slots=slots, seed=seed)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`. EngineError: prompt and `max_tokens` exceed the context, or the logits are not finite."""
        prompt, session = np.asarray(request.prompt_ids).tolist(), request.session
        self._refuse(prompt, request.sampling, request.routes_from)
        number = self._requests[session] = self._requests.get(session, 0) + 1
        draws = random.Random(f"{self._seed}/{session}/{number}")  # noqa: S311 sampling, not secrets
        row = _Row(request, prompt, draws, asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._serve(), name="cpu-engine")
        try:
            return await row.answer
        finally:
            self._remove(row)

    def abort_all(self) -> None:
        """End every request now: each `generate` returns what it has so far with stop reason `aborted`."""
        for row in [*self._active, *self._waiting]:
            self._finish(row, "aborted")

    def release(self, session: str) -> None:
        """The session is over: end its requests as aborted and free its slots."""
        for row in [row for row in (*self._active, *self._waiting) if row.request.session == session]:
            self._finish(row, "aborted")
        self._requests.pop(session, None)
        self._cache.release(session)

    def set_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        """Take HF-named weights as `version`. Requests in progress are aborted and all KV is dropped: it belongs to the old weights."""
        for row in list(self._active):
            self._finish(row, "aborted")
        self._cache.drop()
        self._policy.load(named)
        self.version = version

    @property
    def load(self) -> tuple[int, int, int]:
        """(requests running, requests waiting, slots held)."""
        return len(self._active), len(self._waiting), self._cache.used

    def kv(self) -> KV:
        """See `ReportsKV`; the unit is a slot."""
        cache, (held, resident) = self._cache, self._cache.sessions()
        return KV(len(cache.tokens), cache.context, held, resident, cache.evicted, cache.prompted, cache.reused, self._name)

    def _refuse(self, prompt: list[int], sampling: Sampling, routes_from: int) -> None:
        vocab, context = self._policy.shape.vocab, self._cache.context
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
            raise EngineError(f"the prompt must hold token ids of 0 to {vocab - 1}, got {len(prompt)} ids")
        if sampling.max_tokens < 1 or not 0 <= sampling.temperature < math.inf:
            raise EngineError(f"cannot sample with {sampling}")
        if len(prompt) + sampling.max_tokens > context:
            raise EngineError(
                f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed the context of {context} tokens: "
                "shorten the prompt or max_tokens, or raise model.context"
            )
        if not 0 <= routes_from < len(prompt):
            raise EngineError(f"routes_from {routes_from} lies outside the prompt of {len(prompt)} tokens")

    async def _serve(self) -> None:
        """Runs while there are requests; `generate` starts it again."""
        while self._waiting or self._active:
            try:
                while admitted := self._admit():  # all prompts first: a session asks again only after its answer, so this ends
                    self._advance(admitted, [row.prompt[len(self._cache.tokens[_slot(row)]) :] for row in admitted])
                    await asyncio.sleep(0)
                if self._active:
                    self._advance(self._active, [row.tokens[-1:] for row in self._active])
            except Exception as error:  # noqa: BLE001 whatever it is, no request may wait for ever
                for row in [*self._active, *self._waiting]:
                    self._fail(row, f"the engine failed in a forward pass: {error}")
            await asyncio.sleep(0)

    def _admit(self) -> list[_Row]:
        """Move waiting requests to the active ones, in order of arrival, as far as slots and the prefill bound allow."""
        admitted: list[_Row] = []
        tokens = 0
        for row in self._waiting:
            if tokens >= _PREFILL_TOKENS or (slot := self._cache.acquire(row.request.session, row.request.salt, row.prompt)) is None:
                break
            row.slot = slot
            tokens += len(row.prompt) - len(self._cache.tokens[slot])
            admitted.append(row)
        del self._waiting[: len(admitted)]
        self._active.extend(admitted)
        return admitted

    def _advance(self, rows: Sequence[_Row], new: Sequence[Sequence[int]]) -> None:
        """One forward pass and one sampled token for `rows`."""
        rows = list(rows)
        logits = self._policy.extend(self._cache, [_slot(row) for row in rows], new)
        drawn = draw(logits, [row.request.sampling.temperature for row in rows], [row.random.random() for row in rows])
        for row, token, log_prob in zip(rows, *drawn, strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            if not math.isfinite(log_prob):
                self._fail(row, f"the logits of weight version {self.version} are not finite: the policy has diverged")
                continue
            if row.request.on_tokens is not None:
                row.request.on_tokens([token], [log_prob])
            if token in row.request.sampling.stop_token_ids:
                self._finish(row, "stop")
            elif len(row.tokens) == row.request.sampling.max_tokens:
                self._finish(row, "length")

    def _finish(self, row: _Row, reason: StopReason) -> None:
        generation = Generation(row.tokens, row.log_probs, self._routes(row), reason, self.version)
        self._remove(row)
        if not row.answer.done():
            row.answer.set_result(generation)

    def _fail(self, row: _Row, message: str) -> None:
        self._remove(row)
        if not row.answer.done():
            row.answer.set_exception(EngineError(message))

    def _remove(self, row: _Row) -> None:
        """Take a row out, whatever its state; calling it again is harmless."""
        if row.slot is not None:
            self._active.remove(row)
            self._cache.unpin(row.slot)
            row.slot = None
        elif row in self._waiting:
            self._waiting.remove(row)

    def _routes(self, row: _Row) -> np.ndarray | None:
        if self._cache.routes is None:
            return None
        if row.slot is None:
            return self._cache.routes[0, :0].copy()
        return self._cache.routes[row.slot, row.request.routes_from : len(self._cache.tokens[row.slot])].copy()


def _slot(row: _Row) -> int:
    assert row.slot is not None  # noqa: S101 rows are admitted before they are computed
    return row.slot
