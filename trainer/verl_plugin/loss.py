"""verl's loss callback around the pure GSPO surrogate."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.workers.utils.padding import no_padding_2_padding

from trainer.learning.gspo import surrogate

SUMS = ("rollouts", "clipped", "abs_log_ratio")
"""What a micro-batch reports: sums over rollouts."""


def branch_gspo(
    model_output: dict[str, Any], data: TensorDict, dp_group: Any = None, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of one micro-batch and its sums over rollouts: each row counts with its `share` of its rollout.

    FSDP averages gradients over data-parallel ranks, hence the factor `dp_size`.
    """
    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    padded = data.select("response_mask", "old_log_probs").to_padded_tensor()
    result = surrogate(
        log_probs, padded["old_log_probs"], padded["response_mask"].bool(), data["weight"], data["log_ratio"], clip_low, clip_high
    )
    share = data["share"]
    sums = (share.sum(), (share * result.clipped).sum(), (share * result.log_ratios.abs()).sum())
    return result.loss * data["dp_size"], dict(zip(SUMS, map(float, sums), strict=True))
