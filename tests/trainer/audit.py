"""The invariants of a capture, checked against what the engine really saw."""

from __future__ import annotations

import numpy as np

from tests.trainer.scripted import ScriptedEngine, routes_at
from trainer.capture.capture import Capture


def audit(capture: Capture, engine: ScriptedEngine, session: str = "r-1") -> None:
    """Concatenated nodes equal the calls; each sampled token is masked in exactly one sample, with its own log-prob, version and routes."""
    calls = [call for call in engine.calls if call.session == session]
    turns = capture.graph.turns
    seen = {tuple(call.prompt + call.sampled): call for call in calls}
    for turn in turns:
        whole = np.concatenate([node.ids for node in turn.path()])
        call = seen[tuple(whole.tolist())]
        assert turn.prompt_tokens == len(call.prompt)
        assert turn.sampled.tolist() == call.sampled
        np.testing.assert_array_equal(turn.log_probs, np.array(call.log_probs, np.float32))
        assert turn.spans == [(0, call.version)]
    samples = capture.samples()
    assert sum(int(sample.mask.sum()) for sample in samples) == sum(len(turn.sampled) for turn in turns) == capture.sampled_tokens
    for sample in samples:
        assert not sample.log_probs[~sample.mask].any()
        assert (sample.versions[~sample.mask] == -1).all()
        assert (sample.versions[sample.mask] >= 0).all()
        assert not sample.routed[-1]
        if engine.routes:
            assert sample.routes is not None
            where = np.flatnonzero(sample.routed)
            np.testing.assert_array_equal(sample.routes[where], routes_at(sample.tokens[where], where))
        ends = np.flatnonzero(np.diff(np.append(sample.mask, False).astype(int)) == -1) + 1
        whole = {tuple(call.prompt + call.sampled) for call in calls}
        assert all(tuple(sample.tokens[:end].tolist()) in whole for end in ends)
    record = capture.record("trial")
    assert sum(branch.sampled_tokens for branch in record.branches) == record.sampled_tokens == capture.sampled_tokens
    assert record.violations == []
