"""The readable side of a capture: text and numbers of every turn and branch."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from server.schemas.capture import BranchRecord, CaptureRecord, ToolCallRecord, TurnRecord
from server.schemas.runspec import TrainRule
from trainer.capture.graph import Turn
from trainer.capture.message import Message
from trainer.capture.samples import undelivered

if TYPE_CHECKING:
    from trainer.capture.capture import Capture


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
                drift=Counter(turn.drift for turn in branch.owned if turn.drift is not None),
            )
            for i, branch in enumerate(branches)
        ],
        sampled_tokens=capture.sampled_tokens,
        violations=capture.violations,
        unknown_fields=sorted(capture.unknown_fields),
    )


def _turn(turn: Turn, branch: int, delivered: bool) -> TurnRecord:
    message, context = turn.message, _context(turn)
    return TurnRecord(
        index=turn.index,
        branch=branch,
        context=[(added.role, added.content) for added in context],
        answers=[added.tool_call_id for added in context],
        text=message.content,
        reasoning=message.reasoning,
        tool_calls=[ToolCallRecord(id=call.id, name=call.name, arguments=json.dumps(call.arguments)) for call in message.tool_calls],
        prompt_tokens=turn.prompt_tokens,
        sampled_tokens=len(turn.sampled),
        finish=turn.stop,
        delivered=delivered,
        drift=turn.drift,
        policy_version=turn.spans[0][1],
        policy_versions=turn.spans,
        started=turn.started,
        finished=turn.finished,
    )


def _context(turn: Turn) -> list[Message]:
    """Messages behind the turn before this one, or behind the root. Walks no further, so that a long rollout costs no square of it."""
    messages, node = [], turn.parent
    while node is not None and node.parent is not None and not isinstance(node, Turn):
        messages.append(node.message)
        node = node.parent
    return messages[::-1]
