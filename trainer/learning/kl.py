"""The low-variance estimate of KL(policy ‖ reference) on sampled tokens (`k3`: Schulman 2020), a term of the loss only."""

from __future__ import annotations

import torch

MAX_DIFFERENCE = 20.0
"""Nats: keeps exp() finite, as in verl's estimator."""
MAX_TERM = 10.0
"""verl's bound of one token's term; beyond it the term has no gradient."""


def low_variance_kl(log_probs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over rows of weight · token mean of exp(d) - 1 - d, d = reference - policy; a scalar with gradient.

    `log_probs`, `reference` and `mask` (bool) are [rows, tokens], `weights` [rows]: the coefficient times the row's factor.
    """
    difference = (reference - log_probs).where(mask, 0).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    terms = (difference.exp() - difference - 1).clamp(max=MAX_TERM)
    return (weights * terms.sum(-1) / mask.sum(-1).clamp(min=1)).sum()
