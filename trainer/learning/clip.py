"""The clipped surrogate of any ratio, per token, summed over the rows of a micro-batch."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 10.0
"""Keeps exp() finite; far outside every clip range."""


def clipped_loss(
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus the sum over rows of weight · token mean of min(ratio, clip(ratio)), a scalar with gradient, and which tokens were clipped.

    `log_ratio` and `mask` (bool) are [rows, tokens], `weights` [rows]: the advantage times the row's factor, whose sign decides the side
    of the clip. `log_ratio` must be finite where `mask` is False. `correction` [rows, tokens] multiplies each token's term.
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    weight = weights.unsqueeze(-1)
    free = -weight * ratio
    bounded = -weight * ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(free, bounded)
    if correction is not None:
        terms = terms * correction
    loss = ((terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum()
    return loss, (bounded > free) & mask
