"""Who was there: every session-level model call with the engine calls that it came to, and the capture checked against them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from server.schemas.runspec import TrainRule
from tests.trainer.scripted import ScriptedEngine, routes_at
from trainer.capture.capture import Capture
from trainer.capture.graph import Turn
from trainer.capture.sample import Sample
from trainer.engine.base import Generation, GenerationRequest
from trainer.proxy.limits import Patience
from trainer.proxy.upstream import Upstream


@dataclass
class Piece:
    """One engine call: what it was sent, and all that came of it, whether it ended well or not."""

    prompt: list[int]
    version: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass
class Seen:
    """One call of the session, whole."""

    prompt: list[int]
    pieces: list[Piece]
    ended: bool = False

    @property
    def ids(self) -> list[int]:
        return [id for piece in self.pieces for id in piece.ids]

    @property
    def log_probs(self) -> list[float]:
        return [value for piece in self.pieces for value in piece.log_probs]

    @property
    def versions(self) -> list[int]:
        return [piece.version for piece in self.pieces for _ in piece.ids]


PIECES: ContextVar[list[Piece]] = ContextVar("pieces")


class Witness:
    """An engine for a session: the real `Upstream` over a scripted engine, watched on both sides. `pause` says how many turns of the loop
    an engine call waits first, which is what interleaves calls."""

    def __init__(self, engine: ScriptedEngine, pause: Callable[[], int]) -> None:
        self.engine, self.pause = engine, pause
        self.upstream = Upstream(_Below(self), Patience(backoff=0))
        self.seen: list[Seen] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        call = Seen(list(request.prompt_ids), [])
        self.seen.append(call)
        PIECES.set(call.pieces)
        generation = await self.upstream.generate(request)
        call.ended = True
        return generation

    def new_weights(self) -> None:
        self.engine.version += 1
        self.upstream.version = self.engine.version


class _Below:
    def __init__(self, witness: Witness) -> None:
        self.witness = witness

    async def generate(self, request: GenerationRequest) -> Generation:
        for _ in range(self.witness.pause()):
            await asyncio.sleep(0)
        engine = self.witness.engine
        piece = Piece(list(request.prompt_ids), engine.version)
        PIECES.get().append(piece)

        def take(ids: list[int], log_probs: list[float]) -> None:
            piece.ids, piece.log_probs = piece.ids + ids, piece.log_probs + log_probs
            if request.on_tokens is not None:
                request.on_tokens(ids, log_probs)

        generation = await engine.generate(dataclasses.replace(request, on_tokens=take))
        piece.ids, piece.log_probs, piece.version = generation.token_ids, generation.log_probs, generation.version
        return generation


def check(capture: Capture, witness: Witness) -> None:
    """Concatenated nodes are what the engine was sent and returned, and each sampled token is trained or excluded, once, as it was."""
    calls = {tuple(call.prompt + call.ids): call for call in witness.seen if call.ended}
    for call in calls.values():
        for before, after in zip(call.pieces, call.pieces[1:], strict=False):
            assert after.prompt == before.prompt + before.ids
        assert call.pieces[0].prompt == call.prompt
    turns = capture.graph.turns
    assert len(turns) == len(calls) == sum(call.ended for call in witness.seen)
    for turn in turns:
        call = calls[tuple(np.concatenate([node.ids for node in turn.path()]).tolist())]
        assert (turn.prompt_tokens, turn.sampled.tolist()) == (len(call.prompt), call.ids)
        assert turn.log_probs.tolist() == np.array(call.log_probs, np.float32).tolist()
        assert turn.versions().tolist() == call.versions
    leaves = [node for node in capture.graph.nodes() if not node.children and node.parent is not None]
    assert all(isinstance(leaf, Turn) for leaf in leaves)  # what was refused or given up is gone
    for rule in TrainRule:
        samples = capture.samples(rule)
        ends = [end for sample in samples for end in _masked(sample, calls)]
        assert sorted(ends) == sorted(calls)  # every call in exactly one mask
        trained = sum(int(sample.mask.sum()) for sample in samples if sample.excluded is None)
        excluded = sum(int(sample.mask.sum()) for sample in samples if sample.excluded is not None)
        assert trained + excluded == capture.sampled_tokens == sum(len(call.ids) for call in calls.values())
        record = capture.record("t", rule)
        assert [branch.sampled_tokens for branch in record.branches] == [int(sample.mask.sum()) for sample in samples]
        assert [(b.reason, b.branch_class, b.excluded) for b in record.branches] == [
            (s.reason, s.branch_class, s.excluded) for s in samples
        ]
        if witness.engine.routes:
            check_routes(samples)


def _masked(sample: Sample, calls: dict[tuple[int, ...], Seen]) -> list[tuple[int, ...]]:
    """The calls whose sampled tokens are the runs of a mask; nothing else may be in it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.mask, [False]]).astype(int)))
    found = []
    for start, end in edges.reshape(-1, 2):
        whole = tuple(sample.tokens[:end].tolist())
        call = calls[whole]
        assert start == len(call.prompt)
        assert sample.log_probs[start:end].tolist() == np.array(call.log_probs, np.float32).tolist()
        assert sample.versions[start:end].tolist() == call.versions
        found.append(whole)
    assert not sample.log_probs[~sample.mask].any() and (sample.versions[~sample.mask] == -1).all()
    assert sample.prompt_len == edges[0]
    return found


def check_routes(samples: list[Sample]) -> None:
    """A row is that of its own token and position, or it is marked as missing."""
    for sample in samples:
        assert not sample.routed[-1]
        where = np.flatnonzero(sample.routed)
        if len(where):
            assert sample.routes is not None
            np.testing.assert_array_equal(sample.routes[where], routes_at(sample.tokens[where], where))
