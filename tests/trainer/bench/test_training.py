from __future__ import annotations

import pytest
from click.testing import CliRunner

from trainer.bench.training.measure import Measured, _spec, summary
from trainer.cli import main


def test_overhead_is_what_neither_rollouts_nor_arithmetic_take() -> None:
    """Steps end at 10, 13, 16, 20 s; the first belongs to the start."""
    parts = [(1.0, 0.5), (1.0, 1.0), (1.5, 1.0), (2.0, 1.0)]
    steps = [
        (end, {"timing_s/gen": rollouts, "timing_s/arithmetic": arithmetic})
        for end, (rollouts, arithmetic) in zip((10.0, 13.0, 16.0, 20.0), parts, strict=True)
    ]
    found = summary(_spec(4, "async", "builtin:x"), steps, 2.5, [900.0, 1000.0, 1001.0], 3.0)
    assert found == Measured("async", 4, 7.5, 3.0, 1.5, 1.0, 1.0, 1001.0, 1.0, 3.0)
    assert "overhead 1.00 s" in found.line and "+1 MB over 4 steps, load 3.0" in found.line


def test_a_policy_that_does_not_ship_is_said() -> None:
    done = CliRunner().invoke(main, ["bench", "trainer", "--steps", "3", "--policy", "builtin:none"])
    assert done.exit_code == 1 and "no policy 'builtin:none' ships" in done.output


@pytest.mark.slow
def test_a_short_run_is_measured() -> None:
    done = CliRunner().invoke(main, ["bench", "trainer", "--steps", "3"])
    assert done.exit_code == 0 and "start-up to step 1" in done.output, done.output
