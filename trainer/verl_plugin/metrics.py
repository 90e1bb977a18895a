"""Where verl's metrics go: to the server, and as one readable line per step to a log."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from server.schemas.events import StepBody
from server.schemas.spool import Reporter


class ReportingSink:
    """A backend of verl's `Tracking`. The log of step 0 holds an evaluation only, which is reported as such."""

    def __init__(self, reporter: Reporter, say: Callable[[str], None], steps: int) -> None:
        self._reporter, self._say, self._steps = reporter, say, steps

    def log(self, data: dict[str, Any], step: int) -> None:
        if step == 0:
            return
        metrics = {name: float(value) for name, value in data.items() if isinstance(value, Real)}
        self._reporter.report(StepBody(step=step, metrics=metrics))
        self._say(step_line(metrics, step, self._steps))


def step_line(metrics: dict[str, float], step: int, steps: int) -> str:
    """`step 3/12  reward .41  64 trials, 2 failed  6 of 8 groups with signal  1,402 tokens trained  pearson 1.0000  9.8 s`"""
    value = metrics.get
    parts = [f"step {step}/{steps}"]
    if not math.isnan(reward := value("lego/reward/mean", math.nan)):
        parts.append(f"reward {reward:.3f}")
    parts.append(f"{value('lego/trials', 0):.0f} trials, {value('lego/failed', 0):.0f} failed")
    parts.append(f"{value('lego/groups_with_signal', 0):.0f} of {value('lego/groups', 0):.0f} groups with signal")
    parts.append(f"{value('lego/trained_tokens', 0):,.0f} tokens trained")
    if not math.isnan(pearson := value("training/rollout_actor_probs_pearson_corr", math.nan)):
        parts.append(f"pearson {pearson:.5f}")
    parts.append(f"{value('timing_s/step', 0):.1f} s")
    return "  ".join(parts)
