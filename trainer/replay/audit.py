"""The promises of a capture, checked against what the engine was sent and what it returned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from server.schemas.runspec import TrainRule
from trainer.capture.capture import Capture
from trainer.capture.sample import Sample
from trainer.replay.engine import Call


def violations(capture: Capture, calls: Sequence[Call], rule: TrainRule) -> Iterator[str]:
    """One line for each promise that does not hold; none for a sound capture."""
    yield from capture.violations
    for name in ("engine_error", "proxy_error"):
        if error := getattr(capture, name):
            yield f"{name}: {error}"
    known: dict[bytes, list[Call]] = {}
    for call in calls:
        if call.completed:
            known.setdefault(np.asarray([*call.prompt, *call.ids], np.int32).tobytes(), []).append(call)
    turns = capture.graph.turns
    for turn in turns:
        whole = np.concatenate([node.ids for node in turn.path()])
        if problem := _differs(known.get(whole.tobytes(), []), turn.prompt_tokens, turn.sampled, turn.log_probs):
            yield f"turn {turn.index}: {problem}"
    samples = capture.samples(rule)
    masked, total = sum(int(sample.mask.sum()) for sample in samples), sum(len(turn.sampled) for turn in turns)
    if masked != total or total != capture.sampled_tokens:
        yield f"{total} tokens sampled, {capture.sampled_tokens} counted, {masked} under a mask"
    returned = list(itertools.chain.from_iterable(call.ids for call in calls if call.completed))
    if len(returned) != total:
        yield f"the engine returned {len(returned)} tokens, the capture holds {total}"
    for n, sample in enumerate(samples):
        yield from (f"sample {n}: {problem}" for problem in _sample(sample, known))


def _sample(sample: Sample, known: dict[bytes, list[Call]]) -> Iterator[str]:
    if sample.log_probs[~sample.mask].any() or (sample.versions[~sample.mask] != -1).any() or (sample.versions[sample.mask] < 0).any():
        yield "log-probability or version where nothing was sampled"
    edges = np.diff(np.concatenate([[0], sample.mask.astype(np.int8), [0]]))
    for start, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        calls = known.get(sample.tokens[:end].astype(np.int32).tobytes(), [])
        if problem := _differs(calls, int(start), sample.tokens[start:end], sample.log_probs[start:end]):
            yield f"mask of tokens {start} to {end}: {problem}"


def _differs(calls: Sequence[Call], prompt: int, sampled: np.ndarray, log_probs: np.ndarray) -> str:
    """Why a context that ends in a sampled turn is none of the engine's calls with the same ids; empty when it is one."""
    if not calls:
        return "its context is no prompt and answer of the engine"
    calls = [call for call in calls if len(call.prompt) == prompt and call.ids == sampled.tolist()]
    if not calls:
        return "the sampled ids begin at another place than the engine's"
    same = any(np.array_equal(log_probs, np.asarray(call.log_probs(), np.float32)) for call in calls)
    return "" if same else "log-probabilities differ from the engine's"
