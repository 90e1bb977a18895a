"""Group-relative advantages and the weight of each member in the objective (paper section 3.1.1, Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DELTA = 1e-6
"""The paper's δ; also the epsilon of verl's GRPO estimator."""

Normaliser = Literal["group", "valid"]


class NoSignal(StrEnum):
    """Why a whole group carries no gradient."""

    TOO_FEW_SCORED = "too_few_scored"
    """Fewer than two members were scored: there is no baseline to compare with."""
    ZERO_VARIANCE = "zero_variance"
    """All scored members earned the same reward."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """One group of G members. `advantages` and `weights` are [G] float64 and 0 for failed members.

    `weights` is the factor of each member inside the group's sum: 1/G (`group`, Eq. 1 with w = 0 members counted in G) or
    1/(number scored) (`valid`). When `no_signal` is set every advantage is exactly 0 and nothing of the group needs training.
    """

    advantages: NDArray[np.float64]
    weights: NDArray[np.float64]
    mean: float
    std: float
    no_signal: NoSignal | None


def group_advantages(rewards: Sequence[float | None], normaliser: Normaliser = "group") -> GroupAdvantages:
    """(r - mean) / (std + δ) over the scored members of one group; None marks a failed member.

    Failed members enter neither the mean nor the deviation. `std` is the unbiased one (n - 1), as in `torch.std` and hence in verl's
    GRPO estimator; the paper does not say which. Unlike verl, a single scored member gets no advantage instead of its raw reward.
    """
    if not rewards:
        raise ValueError("a group needs at least one member")
    scored = np.array([reward is not None for reward in rewards])
    values = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, got {list(rewards)}")

    advantages = np.zeros(len(rewards))
    weights = scored / (len(rewards) if normaliser == "group" else max(len(values), 1))
    if len(values) < 2:
        mean = float(values.mean()) if len(values) else 0.0
        return GroupAdvantages(advantages, weights, mean, 0.0, NoSignal.TOO_FEW_SCORED)
    mean = float(values.mean())
    if (values == values[0]).all():  # compared exactly: a rounding error over δ would be an advantage
        return GroupAdvantages(advantages, weights, mean, 0.0, NoSignal.ZERO_VARIANCE)
    std = float(values.std(ddof=1))
    advantages[scored] = (values - mean) / (std + DELTA)
    return GroupAdvantages(advantages, weights, mean, std, None)
