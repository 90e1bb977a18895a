"""Drawing one token per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.inference_mode()
def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of one draw per row of `logits` [B, vocab]; `uniforms` are in [0, 1).

    The log-prob is that of softmax(logits / temperature), the distribution drawn from. Temperature 0 takes the most likely token and
    reports its log-prob at temperature 1, the drawn distribution being a point.
    """
    heat = torch.tensor([t or 1.0 for t in temperatures])[:, None]
    log_probs = (logits / heat).log_softmax(-1)
    # Inverse CDF in fp64: one uniform per row, so a row's draw does not depend on who shares the batch.
    cdf = log_probs.double().exp().cumsum(-1)
    target = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[1] - 1)
    greedy = [not t for t in temperatures]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy)[:, None], log_probs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0].tolist(), log_probs.gather(1, tokens)[:, 0].tolist()
