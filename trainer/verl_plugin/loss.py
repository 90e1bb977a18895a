"""verl's loss callback around the pure objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict
from verl.workers.utils.padding import no_padding_2_padding

from trainer.learning import gspo, token_level
from trainer.learning.kl import low_variance_kl

SUMS = ("rollouts", "clipped", "abs_log_ratio", "kl")
"""What a micro-batch reports: sums over rollouts, and its part of the KL term."""


@dataclass(frozen=True, slots=True)
class Objective:
    """`ratio`: one per rollout over all its branches, or one per token."""

    ratio: Literal["sequence", "token"]
    clip_low: float
    clip_high: float

    def __call__(self, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of one micro-batch and its sums over rollouts: each row counts with its `share` of its rollout.

        Columns beside verl's: see `LegoWorker`. FSDP averages gradients over data-parallel ranks, hence the factor `dp_size`.
        """
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        optional = [name for name in ("correction", "ref_log_prob") if name in data]
        padded = data.select("response_mask", "old_log_probs", *optional).to_padded_tensor()
        old, mask, correction = padded["old_log_probs"], padded["response_mask"].bool(), padded.get("correction", None)
        weights, share = data["weight"], data["share"]
        if self.ratio == "sequence":
            result = gspo.surrogate(log_probs, old, mask, weights, data["log_ratio"], self.clip_low, self.clip_high, correction)
        else:
            result = token_level.surrogate(log_probs, old, mask, weights, self.clip_low, self.clip_high, correction)
        loss, kl = result.loss, 0.0
        if "ref_log_prob" in padded:
            term = low_variance_kl(log_probs, padded["ref_log_prob"], mask, data["kl_weight"])
            loss, kl = loss + term, float(term)
        sums = (float(share.sum()), float((share * result.clipped).sum()), float((share * result.log_ratios.abs()).sum()), kl)
        return loss * data["dp_size"], dict(zip(SUMS, sums, strict=True))
