"""How well the trainer's log-probs agree with those recorded at sampling (paper section 4.4), on trained tokens under equal weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NEAR_CONSTANT = 1e-6
"""A deviation of log-probs (nats) below which a correlation is rounding noise. fp32 resolves about 1e-7 near 1."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """`k3` estimates KL(rollout ‖ trainer) per token in nats; the `abs` values are of trainer - rollout log-probs in nats.

    `pearson` correlates log-probs, `pearson_probability` probabilities (verl's `rollout_actor_probs_pearson_corr`). Both are NaN when
    they are undefined: fewer than two tokens, or both sides constant within NEAR_CONSTANT. When only one side is constant, 0.
    """

    tokens: int
    pearson: float
    pearson_probability: float
    k3: float
    mean_abs: float
    p99_abs: float
    max_abs: float


def fidelity(rollout: ArrayLike, trainer: ArrayLike, mask: ArrayLike) -> Fidelity:
    """Compare log-probs (any one shape, `mask` True on trained tokens); what lies outside the mask is not looked at.

    k3 = mean of exp(d) - 1 - d with d = trainer - rollout: tokens come from the rollout's distribution, so it is unbiased, and each
    term is at least 0. Without a trained token every number is NaN.
    """
    keep = np.asarray(mask, dtype=bool)
    sampled, recomputed = (np.asarray(values, dtype=np.float64)[keep] for values in (rollout, trainer))
    if not len(sampled):
        return Fidelity(0, *[math.nan] * 6)
    difference = recomputed - sampled
    size = np.abs(difference)
    return Fidelity(
        tokens=len(sampled),
        pearson=_pearson(sampled, recomputed),
        pearson_probability=_pearson(np.exp(sampled), np.exp(recomputed)),
        k3=float((np.expm1(difference) - difference).mean()),
        mean_abs=float(size.mean()),
        p99_abs=float(np.quantile(size, 0.99)),
        max_abs=float(size.max()),
    )


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    flat = a.std() < NEAR_CONSTANT, b.std() < NEAR_CONSTANT
    if all(flat) or len(a) < 2:
        return math.nan
    return 0.0 if any(flat) else float(np.corrcoef(a, b)[0, 1])
