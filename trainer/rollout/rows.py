"""From a rollout's samples to the rows that verl's TransferQueue holds: one per branch that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from trainer.capture.sample import Sample

from .trial import Rollout

PARTITION = "train"
"""verl's name of the part of the TransferQueue that training reads."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Names of rows in the TransferQueue and verl's tags of them."""

    keys: list[str]
    tags: list[dict[str, Any]]


def trained_samples(rollout: Rollout) -> list[Sample]:
    """Branches that own a trained token and are not excluded, in the order of the capture."""
    return [sample for sample in rollout.samples if sample.excluded is None and sample.mask.any()]


def row_key(uid: str, sample: int, branch: int) -> str:
    """verl's `{uid}_{session}_{index}`."""
    return f"{uid}_{sample}_{branch}"


def agent_loop_outputs(rollout: Rollout, samples: Sequence[Sample]) -> list[AgentLoopOutput]:
    """verl's form of the branches. `routed_experts` rows without a recorded route are all zero, which replay takes as "route natively"."""
    return [_output(rollout, sample) for sample in samples]


def _output(rollout: Rollout, sample: Sample) -> AgentLoopOutput:
    cut = sample.prompt_len
    versions = sample.versions[sample.mask]
    return AgentLoopOutput(
        prompt_ids=sample.tokens[:cut].tolist(),
        response_ids=sample.tokens[cut:].tolist(),
        response_mask=sample.mask[cut:].astype(int).tolist(),
        response_logprobs=sample.log_probs[cut:].tolist(),
        routed_experts=None if sample.routes is None else np.where(sample.routed[:, None, None], sample.routes, 0).astype(np.int16),
        reward_score=float(rollout.reward or 0),
        num_turns=rollout.turns,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
            "reward_extra_info": {},
        },
    )


def fields_and_tag(output: AgentLoopOutput, uid: str, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns and the tag of one row, as verl's own TransferQueue worker writes them."""
    fields = output.as_dict()
    fields["uid"] = uid
    fields["loss_mask"] = fields["response_mask"]
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
    fields["position_ids"] = torch.arange(len(fields["input_ids"]))
    prompt_len, response_len = len(output.prompt_ids), len(output.response_ids)
    tag = {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": step,
        "min_global_steps": output.extra_fields["min_global_steps"],
        "max_global_steps": output.extra_fields["max_global_steps"],
    }
    return fields, tag


def prompt_rows(uid: str, step: int, rollouts: Sequence[Rollout]) -> tuple[Rows, list[dict[str, Any]]]:
    """The rows of a prompt's rollouts and their columns. A failed trial leaves no row: statistics and loss never see it."""
    rows, columns = Rows([], []), list[dict[str, Any]]()
    for rollout in rollouts:
        for branch, output in enumerate(agent_loop_outputs(rollout, trained_samples(rollout))):
            row, tag = fields_and_tag(output, uid, step)
            rows.keys.append(row_key(uid, rollout.sample, branch))
            rows.tags.append(tag)
            columns.append(row)
    return rows, columns


def store(rows: Rows, columns: list[dict[str, Any]]) -> None:
    """Blocks while the TransferQueue takes them."""
    tq.kv_batch_put(keys=rows.keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(columns), tags=rows.tags)


def discard(keys: list[str]) -> None:
    if keys:
        tq.kv_clear(keys=keys, partition_id=PARTITION)
