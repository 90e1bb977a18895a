"""The surrogate of PPO and token-level GRPO: Eq. 1 of the paper with the ratio of each token in place of the sequence's.

The two differ in the rows' weights alone (`weights.row_factors`, `weights.token_factors`): whether rollouts or tokens weigh the same.
"""

from __future__ import annotations

import torch

from .clip import clipped_loss
from .gspo import Surrogate


def surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    correction: torch.Tensor | None = None,
) -> Surrogate:
    """Loss of one micro-batch: minus the sum over rows of weight · token mean of min(r A, clip(r) A), r = π_θ / π_old of the token.

    `log_probs`, `old_log_probs` and `mask` (bool) are [rows, tokens], `weights` [rows]: advantage times factor.
    """
    log_ratio = (log_probs - old_log_probs).where(mask, 0)
    loss, clipped = clipped_loss(log_ratio, mask, weights, clip_low, clip_high, correction)
    tokens = mask.sum(-1).clamp(min=1)
    return Surrogate(loss, log_ratio.detach().abs().sum(-1) / tokens, clipped.sum(-1) / tokens)
