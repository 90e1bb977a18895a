"""Simulated trials: how long each takes, from a seed and the quantiles of real ones."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

SHIPPED = Path(__file__).with_name("workload.yaml")


class Durations(BaseModel):
    """Seconds. Between the quantiles the logarithm is linear; the fastest trial follows from the mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    p50: float = Field(gt=0)
    p90: float = Field(gt=0)
    p99: float = Field(gt=0)
    longest: float = Field(gt=0)
    mean: float = Field(gt=0)


class Workload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    durations: Durations
    steps: int = Field(ge=1)
    tasks_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)
    slots: int = Field(ge=1)
    trainer_s: float = Field(ge=0)
    sync_s: float = Field(ge=0)
    staleness: int = Field(ge=1)
    seed: int = 0


def load(path: Path = SHIPPED) -> Workload:
    """Raises ValueError for a file that is no workload."""
    return Workload.model_validate(yaml.safe_load(path.read_text()))


@dataclass(frozen=True, slots=True)
class Curve:
    """Duration at a share of the trials: log-linear between `points` (share, seconds)."""

    points: tuple[tuple[float, float], ...]

    def at(self, share: float) -> float:
        for (left, low), (right, high) in zip(self.points, self.points[1:], strict=False):
            if share <= right:
                return low * (high / low) ** ((share - left) / (right - left))
        return self.points[-1][1]

    @property
    def mean(self) -> float:
        """Exact: the mean of low · (high / low)^x for x in [0, 1] is (high - low) / ln(high / low)."""
        parts = zip(self.points, self.points[1:], strict=False)
        return sum((right - left) * (high - low) / math.log(high / low) for (left, low), (right, high) in parts)


def curve(durations: Durations) -> Curve:
    """The fastest trial is chosen so that the mean is met. Raises ValueError when none can."""

    def with_fastest(seconds: float) -> Curve:
        upper = [(0.5, durations.p50), (0.9, durations.p90), (0.99, durations.p99), (1.0, durations.longest)]
        return Curve(((0.0, seconds), *upper))

    low, high = durations.p50 * 1e-6, durations.p50 * (1 - 1e-9)
    if not with_fastest(low).mean <= durations.mean <= with_fastest(high).mean:
        bounds = f"{with_fastest(low).mean:.0f} to {with_fastest(high).mean:.0f}"
        raise ValueError(f"a mean of {durations.mean:g} s does not go with these quantiles: they allow {bounds} s")
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if with_fastest(middle).mean < durations.mean else (low, middle)
    return with_fastest(high)


def duration(workload: Workload, shape: Curve, prompt: int, member: int) -> float:
    """Seconds of one trial: the same in every schedule."""
    return shape.at(random.Random(f"{workload.seed}/{prompt}/{member}").random())  # noqa: S311 a simulation
