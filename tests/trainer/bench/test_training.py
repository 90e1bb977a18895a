from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from trainer.bench.training.measure import Measured, _spec, summary
from trainer.bench.training.memory import Held, growth
from trainer.cli import main


def test_overhead_is_what_neither_rollouts_nor_arithmetic_take() -> None:
    """Steps end at 10, 13, 16, 20 s; the first belongs to the start."""
    parts = [(1.0, 0.5), (1.0, 1.0), (1.5, 1.0), (2.0, 1.0)]
    steps = [
        (end, {"timing_s/gen": rollouts, "timing_s/arithmetic": arithmetic, "timing_s/ours": 0.1})
        for end, (rollouts, arithmetic) in zip((10.0, 13.0, 16.0, 20.0), parts, strict=True)
    ]
    memory = [{1: Held("worker", own, own + 10), 2: Held("launcher", 5.0, 6.0)} for own in (900.0, 1000.0, 1001.0)]
    found = summary(_spec(4, "async", "builtin:x", "plain"), steps, 2.5, memory, 3.0)
    slopes = {"worker": 1.0, "launcher": 0.0}
    assert found == Measured("async", "plain", 4, 7.5, 3.0, 1.5, 1.0, 1.0, found.ours_share, 1017.0, 4.0, slopes, 3.0)
    assert found.ours_share == pytest.approx(0.1 / 2.9)
    assert "overhead 1.00 s" in found.line and "+4 MB over 4 steps, load 3.0" in found.line and "worker +1.00" in found.line


def test_growth_is_of_processes_that_stay() -> None:
    """A worker that came or went in between says nothing; two of one name are added."""
    samples = [{1: Held("w", 10.0 + n, 0.0), 2: Held("w", 20.0 + 2 * n, 0.0)} for n in range(20)]
    samples[-1] = {**samples[-1], 3: Held("late", 500.0, 0.0)}
    assert growth(samples) == {"w": pytest.approx(3.0, rel=0.1)}


def test_a_policy_that_does_not_ship_is_said() -> None:
    done = CliRunner().invoke(main, ["bench", "trainer", "--steps", "3", "--policy", "builtin:none"])
    assert done.exit_code == 1 and "no policy 'builtin:none' ships" in done.output


@pytest.mark.slow
def test_a_short_run_is_measured() -> None:
    """Its memory too: about 2 GB in all, mostly libraries; a run that once wrote whole slots held 8."""
    done = CliRunner().invoke(main, ["bench", "trainer", "--steps", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["memory_mb"] < 4000 and "WorkerDict" in found["slopes"] and found["ours_share"] > 0
