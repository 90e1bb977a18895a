"""Branch weights, and the factor that makes verl's loss equal the objective whatever the number of rows.

The objective of a step over P groups is

    J = 1/P  sum_groups  sum_i w_i  sum_b |M_b|/|M(τ_i)|  mean_{t in M_b} l(i, b, t)

with the member weights w_i of `advantages` (1/G or 1/scored) and GSPO's clipped term l; the inner two sums are the mean of l over all
trained tokens of the rollout. A mini-batch of K stands for K times its share of J, so that the mean over mini-batches is J itself.

verl's `seq-mean-token-mean` gives every row 1/B of its token mean, B = `global_batch_size` being a constant; rows without a trained
token count 0. The clipped loss is positively homogeneous in the advantage, so multiplying a row's advantages by
B · K/P · w_i · |M_b|/|M(τ_i)| turns verl's sum into the objective exactly. Padding rows need no care.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def branch_weights(tokens: Sequence[int]) -> NDArray[np.float64]:
    """|M_b| / |M(τ)| of one rollout's trained branches, from their numbers of trained tokens. Sums to 1."""
    counts = np.asarray(tokens, dtype=np.float64)
    if len(counts) == 0 or (counts <= 0).any():
        raise ValueError(f"every branch needs a trained token, got {list(tokens)}")
    return counts / counts.sum()


def row_factors(
    rollout: Sequence[int],
    tokens: Sequence[int],
    member_weights: Sequence[float],
    *,
    groups: int,
    minibatches: int,
    global_batch_size: int,
) -> NDArray[np.float64]:
    """Factor [rows] by which the advantages of each row are multiplied before verl's loss.

    Row r is a branch of rollout `rollout[r]` with `tokens[r]` trained tokens; `rollout` -1 marks a padding row (factor 0).
    `member_weights[i]` is `GroupAdvantages.weights` of rollout i; `groups` is P, counting groups without signal too;
    `minibatches` is K and `global_batch_size` the constant B that verl divides by. All branches of a rollout must be among the rows.
    """
    owner = np.asarray(rollout, dtype=np.int64)
    counts = np.asarray(tokens, dtype=np.float64)
    weights = np.asarray(member_weights, dtype=np.float64)
    if owner.shape != counts.shape:
        raise ValueError(f"{len(owner)} owners for {len(counts)} rows")
    if min(groups, minibatches, global_batch_size) < 1:
        raise ValueError(f"groups {groups}, minibatches {minibatches} and global_batch_size {global_batch_size} must be positive")
    real = owner >= 0
    if (counts[real] <= 0).any():
        raise ValueError("every row but padding needs a trained token")
    total = np.bincount(owner[real], weights=counts[real], minlength=len(weights))
    factors = np.zeros(len(owner))
    factors[real] = weights[owner[real]] * counts[real] / total[owner[real]] * (global_batch_size * minibatches / groups)
    return factors


def token_factors(
    rollout: Sequence[int], tokens: Sequence[int], *, total: int, minibatches: int, global_batch_size: int
) -> NDArray[np.float64]:
    """The factors [rows] with which every token weighs the same: J = 1/N sum over all tokens of l.

    Arguments as of `row_factors`. `total` is N: the trained tokens of all scored rollouts of the step, those without signal too.
    """
    counts = np.asarray(tokens, dtype=np.float64)
    if min(total, minibatches, global_batch_size) < 1 or counts.sum() > total:
        raise ValueError(f"{counts.sum():.0f} tokens of {total}, minibatches {minibatches}, global_batch_size {global_batch_size}")
    return np.where(np.asarray(rollout) >= 0, counts, 0.0) * (global_batch_size * minibatches / total)
