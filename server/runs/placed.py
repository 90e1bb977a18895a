"""Where the events of a harness's own log belong in its trial's capture: at the tool call they name, else behind the last one that did."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..schemas.capture import BranchClass, CaptureRecord
from ..schemas.harnesslog import LogEvent, LogEventKind


@dataclass(frozen=True, slots=True)
class Placed:
    calls: dict[str, LogEvent] = field(default_factory=dict)
    """Tool-call id → how the tool ran."""
    behind: dict[int, list[LogEvent]] = field(default_factory=dict)
    """Turn → what happened in it or behind it, in order."""
    loose: list[LogEvent] = field(default_factory=list)
    """What belongs to no turn: before the first, or of calls that the proxy never saw."""
    sub_agents: dict[str, int] = field(default_factory=dict)
    """Tool-call id → the branch of the sub-agent that it started."""


def place(record: CaptureRecord) -> Placed:
    """Calls, turns and branches are the capture's; the log only says more about them."""
    placed, last = Placed(), None
    if record.log is None:
        return placed
    turn_of = {call.id: turn.index for turn in record.turns for call in turn.tool_calls}
    policy = {branch.index for branch in record.branches if branch.branch_class is BranchClass.POLICY}
    parents = [turn.index for turn in record.turns if turn.branch in policy]
    for event in record.log.events:
        at = turn_of.get(event.call_id)
        if at is None and event.turn is not None and 0 <= event.turn < len(parents):
            at = parents[event.turn]
        if event.kind is LogEventKind.TOOL and event.call_id:
            if at is not None and event.call_id not in placed.calls:
                placed.calls[event.call_id], last = event, at
            else:
                placed.loose.append(event)
            continue
        at = last if at is None else at
        placed.loose.append(event) if at is None else placed.behind.setdefault(at, []).append(event)
        if event.kind is LogEventKind.SUB_AGENT and event.call_id not in placed.sub_agents:
            branch = _branch_of(record, event.call_id, set(placed.sub_agents.values()))
            if branch is not None:
                placed.sub_agents[event.call_id] = branch
    return placed


def _branch_of(record: CaptureRecord, call_id: str, taken: set[int]) -> int | None:
    """The sub-agent's branch that begins with the longest text among the arguments of the call."""
    arguments = next((call.arguments for turn in record.turns for call in turn.tool_calls if call.id == call_id), "{}")
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    texts = [value for value in found.values() if isinstance(value, str)] if isinstance(found, dict) else []
    prompt = max(texts, key=len, default="")
    for branch in record.branches:
        if branch.branch_class is BranchClass.SUB_AGENT and branch.index not in taken and prompt:
            first = next((turn for turn in record.turns if turn.branch == branch.index), None)
            if first is not None and any(prompt in text for role, text in first.context if role == "user"):
                return branch.index
    return None
