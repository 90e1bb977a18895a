"""GSPO's clipped surrogate (paper Eq. 1) over rollouts that may have several branches, in the stop-gradient form per token.

σ(τ) = exp(mean over M(τ) of log π_θ - log π_old) is one number per rollout, over the trained tokens of *all* its branches. Every token
carries sg[σ] · π_θ / sg[π_θ]: its value is σ and its gradient σ ∇ log π_θ, so the sum over a rollout's tokens divided by |M(τ)| has
exactly the gradient of σ(τ) even when the branches are computed in different micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .clip import clipped_loss


@dataclass(frozen=True, slots=True)
class Surrogate:
    """`loss` is a scalar with gradient; `log_ratios` and `clipped` are [rows], without: log σ and whether it was clipped. With a ratio
    per token (`token_level`): the mean of |log ratio| and the share of clipped tokens."""

    loss: torch.Tensor
    log_ratios: torch.Tensor
    clipped: torch.Tensor


def row_log_ratios(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the trained tokens of each row of log π_θ - log π_old, [rows]; all inputs are [rows, tokens], `mask` bool."""
    return (log_probs - old_log_probs).where(mask, 0).sum(-1)


def rollout_log_ratios(row_sums: torch.Tensor, row_tokens: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    """log σ of the rollout that each row belongs to, [rows], from the rows' sums, numbers of trained tokens and rollout numbers."""
    _, owner = rollout.unique(return_inverse=True)
    size = int(owner.max()) + 1
    sums = row_sums.new_zeros(size).index_add(0, owner, row_sums)
    tokens = row_sums.new_zeros(size).index_add(0, owner, row_tokens.to(row_sums.dtype))
    return (sums / tokens.clamp(min=1))[owner]


def surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    log_ratios: torch.Tensor,
    clip_low: float,
    clip_high: float,
    correction: torch.Tensor | None = None,
) -> Surrogate:
    """Loss of one micro-batch: minus the sum over rows of weight · token mean of the clipped term.

    `log_probs`, `old_log_probs` and `mask` (bool) are [rows, tokens], `weights` and `log_ratios` [rows]. A weight is the advantage times
    the row's factor (`weights.row_factors`). `log_ratios` is log σ of the row's rollout, detached; NaN where the row is the whole
    rollout, and then computed here. `correction`: see `clip.clipped_loss`.
    """
    tokens = mask.sum(-1).clamp(min=1)
    own = row_log_ratios(log_probs, old_log_probs, mask).detach() / tokens
    log_sigma = torch.where(log_ratios.isnan(), own, log_ratios)
    # Masked tokens leave before the exponential: whatever stands there, infinite or NaN, neither value nor gradient sees it.
    token_log_sigma = (log_probs - log_probs.detach()).where(mask, 0) + log_sigma.unsqueeze(-1)
    loss, clipped = clipped_loss(token_log_sigma, mask, weights, clip_low, clip_high, correction)
    return Surrogate(loss, log_sigma, clipped.any(-1))
