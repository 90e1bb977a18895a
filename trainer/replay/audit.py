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
    known = {bytes(np.asarray([*call.prompt, *call.ids], np.int32)): call for call in calls if call.completed}
    turns = capture.graph.turns
    for turn in turns:
        whole = np.concatenate([node.ids for node in turn.path()])
        call = known.get(whole.tobytes())
        if call is None:
            yield f"turn {turn.index}: its path is no prompt and answer of the engine"
        elif len(call.prompt) != turn.prompt_tokens or turn.sampled.tolist() != call.ids:
            yield f"turn {turn.index}: the sampled ids begin at another place than the engine's"
        elif not np.array_equal(turn.log_probs, np.asarray(call.log_probs(), np.float32)):
            yield f"turn {turn.index}: log-probabilities differ from the engine's"
    samples = capture.samples(rule)
    masked, total = sum(int(sample.mask.sum()) for sample in samples), sum(len(turn.sampled) for turn in turns)
    if masked != total or total != capture.sampled_tokens:
        yield f"{total} tokens sampled, {capture.sampled_tokens} counted, {masked} under a mask"
    returned = list(itertools.chain.from_iterable(call.ids for call in calls if call.completed))
    if len(returned) != total:
        yield f"the engine returned {len(returned)} tokens, the capture holds {total}"
    for n, sample in enumerate(samples):
        yield from (f"sample {n}: {problem}" for problem in _sample(sample, known))


def _sample(sample: Sample, known: dict[bytes, Call]) -> Iterator[str]:
    if sample.log_probs[~sample.mask].any() or (sample.versions[~sample.mask] != -1).any() or (sample.versions[sample.mask] < 0).any():
        yield "log-probability or version where nothing was sampled"
    edges = np.diff(np.concatenate([[0], sample.mask.astype(np.int8), [0]]))
    for start, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        call = known.get(sample.tokens[:end].astype(np.int32).tobytes())
        if call is None or len(call.prompt) != start:
            yield f"the mask of tokens {start} to {end} is no sampled turn in its own context"
        elif not np.array_equal(sample.log_probs[start:end], np.asarray(call.log_probs(), np.float32)):
            yield f"log-probabilities of tokens {start} to {end} differ from the engine's"
