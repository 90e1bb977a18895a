from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainer.learning.minibatches import partition
from trainer.learning.weights import branch_weights, row_factors

Aggregate = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def seq_mean_token_mean(loss: torch.Tensor, mask: torch.Tensor, global_batch_size: int) -> torch.Tensor:
    """verl's `agg_loss` in that mode."""
    tokens = mask.sum(-1)
    rows = (loss * mask).sum(-1) / (tokens + 1e-8)
    return (rows * (tokens > 0)).sum() / global_batch_size


def check_objective(groups: list[list[list[int]]], minibatches: int, global_batch_size: int, seed: int, aggregate: Aggregate) -> None:
    """Mean over mini-batches of verl's loss = 1/P sum_groups 1/G sum_i mean of l over all tokens of rollout i."""
    random = np.random.default_rng(seed)
    rollouts = [branches for group in groups for branches in group]
    member_weights = [1 / len(group) for group in groups for _ in group]
    terms = [[random.normal(size=tokens) for tokens in branches] for branches in rollouts]
    exact = sum(weight * np.concatenate(parts).mean() for weight, parts in zip(member_weights, terms, strict=True)) / len(groups)

    width = max(max(branches) for branches in rollouts) + 2
    total = 0.0
    for members in partition([sum(branches) for branches in rollouts], minibatches, seed):
        rows = [(owner, part) for owner in members for part in terms[owner]]
        padding = int(random.integers(0, 3))
        loss, mask = torch.zeros(len(rows) + padding, width, dtype=torch.float64), torch.zeros(len(rows) + padding, width)
        for row, (_, part) in enumerate(rows):
            places = np.sort(random.choice(width, len(part), replace=False))
            loss[row, places] = torch.from_numpy(part)
            mask[row, places] = 1
        owners = [owner for owner, _ in rows] + [-1] * padding
        factors = row_factors(
            owners,
            mask.sum(-1).int().tolist(),
            member_weights,
            groups=len(groups),
            minibatches=minibatches,
            global_batch_size=global_batch_size,
        )
        assert not factors[len(rows) :].any()
        total += float(aggregate(loss * torch.from_numpy(factors)[:, None], mask, global_batch_size))
    assert total / minibatches == pytest.approx(exact, abs=1e-7)


rollout = st.lists(st.integers(1, 9), min_size=1, max_size=3)
steps = st.lists(st.lists(rollout, min_size=1, max_size=4), min_size=1, max_size=4)


@examples(60)
@given(steps, st.integers(1, 4), st.integers(1, 64), st.integers(0, 99))
def test_verls_loss_becomes_the_objective(groups: list[list[list[int]]], minibatches: int, global_batch_size: int, seed: int) -> None:
    check_objective(groups, minibatches, global_batch_size, seed, seq_mean_token_mean)


@pytest.mark.slow
def test_the_same_with_verls_own_code() -> None:
    from verl.trainer.ppo.core_algos import agg_loss

    def aggregate(loss: torch.Tensor, mask: torch.Tensor, global_batch_size: int) -> torch.Tensor:
        return agg_loss(loss, mask, "seq-mean-token-mean", global_batch_size=global_batch_size)

    check_objective([[[3, 5], [4]], [[7], [1, 1, 9], [2]]], 2, 16, 0, aggregate)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_branch_weights_share_out_one(tokens: list[int]) -> None:
    weights = branch_weights(tokens)
    assert weights.sum() == pytest.approx(1)
    assert weights * sum(tokens) == pytest.approx(tokens)


def test_one_branch_each_and_full_batch_needs_no_correction() -> None:
    factors = row_factors([0, 1, 2, 3], [5, 1, 9, 2], [0.5] * 4, groups=2, minibatches=1, global_batch_size=4)
    assert factors == pytest.approx(np.ones(4))


@pytest.mark.parametrize(("rollouts", "tokens", "groups"), [([0], [1, 2], 1), ([0], [0], 1), ([0], [1], 0)])
def test_nonsense_is_refused(rollouts: list[int], tokens: list[int], groups: int) -> None:
    with pytest.raises(ValueError):
        row_factors(rollouts, tokens, [1.0], groups=groups, minibatches=1, global_batch_size=1)
    with pytest.raises(ValueError, match="trained token"):
        branch_weights([1, 0])
