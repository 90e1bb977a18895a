"""How well the trainer's log-probs agree with those recorded at sampling (paper section 4.4), on trained tokens under equal weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NEAR_CONSTANT = 1e-6
"""A deviation of log-probs (nats) below which a correlation is rounding noise. fp32 resolves about 1e-7 near 1."""
MAX_LOG_RATIO = 20.0
"""Keeps a square of exp() finite; a token that far apart is a fault of its own, and `max_abs` shows it."""
EDGES = (-1.0, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1.0)
"""Inner edges (nats) of the histogram of log-ratios; a value on an edge counts above it."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Every difference is trainer - rollout log-prob of a token, in nats; ratio = exp(difference).

    `pearson` correlates log-probs, `pearson_probability` probabilities (verl's `rollout_actor_probs_pearson_corr`). Both are NaN when
    they are undefined: fewer than two tokens, or both sides constant within NEAR_CONSTANT. When only one side is constant, 0.
    `k3` estimates KL(rollout ‖ trainer) and `chi2` the χ² divergence of the trainer from the rollout, E[(ratio - 1)²], per token.
    `ess` is the effective sample size (Σ ratio)² / Σ ratio² as a share of the tokens, in (0, 1].
    `trajectory_p50`, `_p90`, `_p99` are quantiles over trajectories of their mean absolute difference.
    `histogram` counts the differences between EDGES, the two open ends included.
    """

    tokens: int
    histogram: tuple[int, ...]
    pearson: float
    pearson_probability: float
    k3: float
    chi2: float
    ess: float
    mean_abs: float
    p99_abs: float
    max_abs: float
    trajectory_p50: float
    trajectory_p90: float
    trajectory_p99: float


def fidelity(rollout: ArrayLike, trainer: ArrayLike, mask: ArrayLike, trajectory: ArrayLike | None = None) -> Fidelity:
    """Compare log-probs (any one shape, `mask` True on trained tokens); what lies outside the mask is not looked at.

    `trajectory` (the same shape, integers) numbers the trajectory of each token; None: all are of one. k3 = mean of exp(d) - 1 - d with
    d the difference: tokens come from the rollout's distribution, so it is unbiased, and each term is at least 0. Without a trained
    token every number is NaN.
    """
    keep = np.asarray(mask, dtype=bool)
    sampled, recomputed = (np.asarray(values, dtype=np.float64)[keep] for values in (rollout, trainer))
    if not len(sampled):
        return Fidelity(0, (0,) * (len(EDGES) + 1), *[math.nan] * 11)
    difference = recomputed - sampled
    size = np.abs(difference)
    ratio = np.exp(difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    of = np.zeros(len(size), int) if trajectory is None else np.unique(np.asarray(trajectory)[keep], return_inverse=True)[1]
    p50, p90, p99 = np.quantile(np.bincount(of, size) / np.bincount(of), (0.5, 0.9, 0.99))
    return Fidelity(
        tokens=len(sampled),
        histogram=tuple(np.bincount(np.searchsorted(EDGES, difference, side="right"), minlength=len(EDGES) + 1).tolist()),
        pearson=_pearson(sampled, recomputed),
        pearson_probability=_pearson(np.exp(sampled), np.exp(recomputed)),
        k3=float((np.expm1(difference) - difference).mean()),
        chi2=float(((ratio - 1) ** 2).mean()),
        ess=float(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)),
        mean_abs=float(size.mean()),
        p99_abs=float(np.quantile(size, 0.99)),
        max_abs=float(size.max()),
        trajectory_p50=float(p50),
        trajectory_p90=float(p90),
        trajectory_p99=float(p99),
    )


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    flat = a.std() < NEAR_CONSTANT, b.std() < NEAR_CONSTANT
    if all(flat) or len(a) < 2:
        return math.nan
    return 0.0 if any(flat) else float(np.corrcoef(a, b)[0, 1])
