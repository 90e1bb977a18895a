"""The capture as it is stored: a readable record, and the token arrays beside it in a `.npz`."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from server.schemas.capture import BranchClass, BranchReason, BranchRecord, CaptureRecord, Exclusion, ToolCallRecord, TurnRecord
from server.schemas.runspec import TrainRule
from trainer.capture.graph import Turn
from trainer.capture.sample import Sample
from trainer.capture.samples import undelivered

if TYPE_CHECKING:
    from trainer.capture.capture import Capture

ARRAYS = ("tokens", "mask", "log_probs", "versions", "routed", "routes")


def record(capture: Capture, trial_id: str, rule: TrainRule) -> CaptureRecord:
    """Text and numbers of every turn and branch. Sum of the branches' sampled tokens = all sampled tokens."""
    branches, turns = capture.branches(rule), capture.graph.turns
    lost, owner = undelivered(turns), {turn.index: i for i, branch in enumerate(branches) for turn in branch.owned}
    return CaptureRecord(
        trial_id=trial_id,
        harness=capture.harness,
        turns=[_turn(turn, owner[turn.index], turn.index not in lost) for turn in turns],
        branches=[
            BranchRecord(
                index=i,
                reason=branch.reason,
                branch_class=branch.branch_class,
                tokens=branch.turns[-1].end,
                sampled_tokens=sum(len(turn.sampled) for turn in branch.owned),
                excluded=branch.excluded,
                min_version=min(version for turn in branch.owned for _, version in turn.spans),
                max_version=max(version for turn in branch.owned for _, version in turn.spans),
            )
            for i, branch in enumerate(branches)
        ],
        sampled_tokens=capture.sampled_tokens,
        violations=capture.violations,
        unknown_fields=sorted(capture.unknown_fields),
    )


def _turn(turn: Turn, branch: int, delivered: bool) -> TurnRecord:
    message, path = turn.message, turn.path()[:-1]
    behind = max((i for i, node in enumerate(path) if isinstance(node, Turn)), default=0)
    return TurnRecord(
        index=turn.index,
        branch=branch,
        context=[(node.message.role, _text(node.message.content)) for node in path[behind + 1 :]],
        text=_text(message.content),
        reasoning=None if message.reasoning is None else _text(message.reasoning),
        tool_calls=[ToolCallRecord(id=call.id, name=_text(call.name), arguments=json.dumps(call.arguments)) for call in message.tool_calls],
        prompt_tokens=turn.prompt_tokens,
        sampled_tokens=len(turn.sampled),
        finish=turn.stop,
        delivered=delivered,
        policy_version=turn.spans[0][1],
        policy_versions=turn.spans,
    )


def _text(text: str) -> str:
    """A policy can spell lone surrogates in JSON; no file can hold them."""
    return text.encode("utf-8", "replace").decode()


def to_npz(samples: Sequence[Sample]) -> bytes:
    """All samples of a rollout, end to end; `lengths` cuts them. Compressed, without pickles."""
    arrays = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in ARRAYS[:-1]} if samples else {}
    if samples and samples[0].routes is not None:
        arrays["routes"] = np.concatenate([sample.routes for sample in samples])
    labels = [[sample.reason, sample.branch_class, sample.excluded or ""] for sample in samples]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        allow_pickle=False,
        lengths=np.array([len(sample.tokens) for sample in samples], np.int64),
        prompt_lens=np.array([sample.prompt_len for sample in samples], np.int64),
        labels=np.array(labels, np.str_).reshape(-1, 3),
        **arrays,
    )
    return buffer.getvalue()


def from_npz(data: bytes) -> list[Sample]:
    """The samples that `to_npz` wrote, bit for bit. Raises ValueError for a file that is none."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        if missing := {"lengths", "prompt_lens", "labels"} - set(file.files):
            raise ValueError(f"no capture file: {sorted(missing)} missing")
        cuts = np.cumsum(file["lengths"])[:-1]
        parts = {name: np.split(file[name], cuts) for name in ARRAYS if name in file.files}
        labels, prompt_lens = file["labels"].tolist(), file["prompt_lens"].tolist()
    return [
        Sample(
            **{name: parts[name][i] for name in ARRAYS[:-1]},
            routes=parts["routes"][i] if "routes" in parts else None,
            prompt_len=prompt_len,
            reason=BranchReason(reason),
            branch_class=BranchClass(branch_class),
            excluded=Exclusion(excluded) if excluded else None,
        )
        for i, (prompt_len, (reason, branch_class, excluded)) in enumerate(zip(prompt_lens, labels, strict=True))
    ]
