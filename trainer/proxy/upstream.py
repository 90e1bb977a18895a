"""An engine whose troubles stay behind it: calls are tried again, and a turn that was interrupted goes on behind its sampled tokens.

What a client has seen stays true, because the tokens behind it are kept: a resumed turn is prompt + tokens so far, sent as a new prompt.
A turn that lived through a weight update therefore has several policy versions, and every call is salted with the newest one known, so
that KV of older weights is not reused for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass, field

import numpy as np

from trainer.engine.base import (
    Engine,
    EngineError,
    EngineUnavailable,
    Generation,
    GenerationRequest,
    OnTokens,
    Sampling,
    StopReason,
)
from trainer.proxy.limits import Patience

log = logging.getLogger(__name__)


class Upstream:
    """Implements `Engine` over another one. `version` is the newest policy version that the trainer named or an answer had."""

    def __init__(self, engine: Engine, patience: Patience) -> None:
        self._engine, self._patience = engine, patience
        self.version = 0
        self.resumed = 0
        """Calls that were made again, at the start of a turn or behind its first tokens."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """One whole turn. Raises EngineError when it cannot be had; whatever else the engine raises passes through."""
        session, sampling = request.session, request.sampling
        draft, failures = _Draft(request.on_tokens), 0
        while True:
            known, version = len(draft.tokens), self.version
            prompt = np.concatenate([request.prompt_ids, np.array(draft.tokens, np.int32)]) if known else request.prompt_ids
            first = len(prompt) - 1 if known else request.routes_from
            rest = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - known) if known else sampling
            call = GenerationRequest(session, prompt, rest, first, draft.take, request.salt or f"{session}/{version}")
            try:
                generation = await self._engine.generate(call)
                self.version = max(self.version, generation.version)
                draft.settle(known, generation)
                if generation.stop_reason != "aborted":
                    return draft.generation(generation.stop_reason)
                trouble = EngineUnavailable("the generation was aborted")
            except EngineUnavailable as error:
                trouble = error
                draft.lose_routes(known, version)
            if (stop := draft.ended(sampling)) is not None:
                return draft.generation(stop)
            failures = 1 if len(draft.tokens) > known else failures + 1
            if failures >= self._patience.attempts:
                raise trouble
            self.resumed += 1
            pause = self._patience.pause(failures)
            log.warning("engine call of %s interrupted after %d tokens, again in %.1f s: %s", session, len(draft.tokens), pause, trouble)
            await asyncio.sleep(pause)


@dataclass(slots=True)
class _Draft:
    """A turn in the making. `routes` is None once rows were lost."""

    on_tokens: OnTokens | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    routes: list[np.ndarray] | None = field(default_factory=list)

    def take(self, ids: list[int], log_probs: list[float]) -> None:
        self.tokens += ids
        self.log_probs += log_probs
        if self.on_tokens is not None:
            self.on_tokens(ids, log_probs)

    def settle(self, known: int, generation: Generation) -> None:
        """Take what a call returned. What it streamed is the beginning of that."""
        streamed, ids, log_probs = len(self.tokens) - known, generation.token_ids, generation.log_probs
        if len(log_probs) != len(ids):
            raise EngineError(f"{len(log_probs)} log-probabilities for {len(ids)} tokens")
        if self.tokens[known:] != ids[:streamed]:
            raise EngineError("the engine returned other tokens than it streamed")
        if not ids and generation.stop_reason != "aborted":
            raise EngineError("the generation ended without a token")
        if generation.stop_reason == "aborted":
            self.take(ids[streamed:], log_probs[streamed:])
        else:  # the caller gets them with the turn, at once
            self.tokens += ids[streamed:]
            self.log_probs += log_probs[streamed:]
        if ids:
            self._span(known, generation.version)
            if generation.routes is None:
                self.routes = None
            elif self.routes is not None:
                self.routes.append(generation.routes)

    def lose_routes(self, known: int, version: int) -> None:
        """A call failed behind the tokens it had streamed: their experts are not known, and no later pass stands for them."""
        if len(self.tokens) > known:
            self._span(known, version)
            self.routes = None

    def ended(self, sampling: Sampling) -> StopReason | None:
        """Why an interrupted turn is whole all the same: behind a stop token, or the last one allowed, nothing may be sampled."""
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= sampling.max_tokens else None

    def generation(self, stop: StopReason) -> Generation:
        routes = np.concatenate(self.routes) if self.routes and len(self.routes) > 1 else self.routes[0] if self.routes else None
        spans = tuple(self.spans) if len(self.spans) > 1 else ()
        return Generation(self.tokens, self.log_probs, routes, stop, self.spans[-1][1], spans)

    def _span(self, offset: int, version: int) -> None:
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((offset, version))
