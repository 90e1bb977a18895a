"""A trial's capture as an ATIF trajectory (Agent Trajectory Interchange Format, version 1.8), the same for every harness.

What the policy's calls sent and sampled are its steps; what the harness's own log adds (times, errors, compactions, why it ended) stands in
the `extra` of calls, steps and trajectory, so nobody has to read that log. The parent's conversation is the trajectory; sub-agents,
summaries and side calls are trajectories within it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

from ..schemas.capture import BranchClass, BranchRecord, CaptureRecord, TurnRecord
from ..schemas.harnesslog import LogEvent
from .placed import Placed, place

Json = dict[str, Any]
_DEEPEST = 100
"""Values in each other. The proxy takes fewer from a policy; an answer of this server cannot have three hundred."""


def trajectory(record: CaptureRecord, version: str, result: Json) -> Json:
    """`version` is the harness's; `result` goes into the trajectory's `extra`. Raises ValueError when nothing was sampled."""
    if not record.turns:
        raise ValueError(f"the harness of {record.trial_id} made no model call: there is no trajectory")
    parent = [branch for branch in record.branches if branch.branch_class is BranchClass.POLICY]
    others = [branch for branch in record.branches if branch not in parent]
    agent = {"name": record.harness, "version": version, "model_name": "policy"}
    whole: Json = {"schema_version": "ATIF-v1.8", "session_id": record.trial_id, "trajectory_id": "parent", "agent": agent}
    placed = place(record)
    whole["steps"] = _steps(record, parent or others[:1], placed)
    owning = {turn.branch for turn in record.turns}
    if within := [branch for branch in (others if parent else others[1:]) if branch.index in owning]:
        whole["subagent_trajectories"] = [_within(record, branch, agent, placed) for branch in within]
    whole["final_metrics"] = {
        "total_prompt_tokens": sum(turn.prompt_tokens for turn in record.turns),
        "total_completion_tokens": record.sampled_tokens,
        "total_steps": len(whole["steps"]),
    }
    extra = result | {"violations": record.violations}
    if record.log is not None:
        extra["harness"] = record.log.model_dump(mode="json", exclude={"events"}) | {"events": [_event(event) for event in placed.loose]}
    return whole | {"extra": extra}


def _within(record: CaptureRecord, branch: BranchRecord, agent: Json, placed: Placed) -> Json:
    extra = {"class": branch.branch_class.value, "reason": branch.reason.value, "excluded": branch.excluded}
    steps = _steps(record, [branch], placed)
    return {"schema_version": "ATIF-v1.8", "trajectory_id": f"branch-{branch.index}", "agent": agent, "steps": steps, "extra": extra}


def _steps(record: CaptureRecord, branches: list[BranchRecord], placed: Placed) -> list[Json]:
    """Steps of the branches' turns, in the order of the calls."""
    wanted, steps = {branch.index for branch in branches}, list[Json]()
    for turn in record.turns:
        if turn.branch in wanted:
            _add_context(steps, turn)
            steps.append(_sampled(turn, placed))
    return [{"step_id": number} | step for number, step in enumerate(steps, 1)]


def _add_context(steps: list[Json], turn: TurnRecord) -> None:
    """What was new to a call: tool results belong to the step before them, everything else is a step of its own."""
    for (role, text), call in zip_longest(turn.context, turn.answers[: len(turn.context)]):
        if role == "tool":
            if not steps or steps[-1]["source"] == "user":
                steps.append({"source": "system", "message": ""})
            # Results of calls in parallel come back in the order of their completion; one of an earlier turn names no call of this step.
            asked = call if call in {made["tool_call_id"] for made in steps[-1].get("tool_calls", [])} else None
            steps[-1].setdefault("observation", {"results": []})["results"].append({"source_call_id": asked, "content": text})
        elif role == "assistant":
            steps.append({"source": "agent", "message": text, "is_copied_context": True})
        else:
            steps.append({"source": "system" if role == "system" else "user", "message": text})


def _sampled(turn: TurnRecord, placed: Placed) -> Json:
    facts = {"finish": turn.finish, "delivered": turn.delivered, "branch": turn.branch, "policy_version": turn.policy_version}
    step: Json = {"source": "agent", "message": turn.text, "llm_call_count": 1}
    step["metrics"] = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.sampled_tokens, "extra": facts}
    if turn.reasoning is not None:
        step["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": _object(call.arguments)} for call in turn.tool_calls
        ]
    _add_log(step, turn, placed)
    return step


def _add_log(step: Json, turn: TurnRecord, placed: Placed) -> None:
    """What the harness's log says of a turn. A sub-agent's trajectory is named by a result of the call that started it."""
    ran = [placed.calls[call.id] for call in turn.tool_calls if call.id in placed.calls]
    for call in step.get("tool_calls", []):
        if (event := placed.calls.get(call["tool_call_id"])) is not None:
            call["extra"] = {name: value for name, value in _event(event).items() if name in ("started", "seconds", "ok")}
        if (branch := placed.sub_agents.get(call["tool_call_id"])) is not None:
            reference = {"source_call_id": call["tool_call_id"], "subagent_trajectory_ref": [{"trajectory_id": f"branch-{branch}"}]}
            step.setdefault("observation", {"results": []})["results"].append(reference)
    if events := placed.behind.get(turn.index):
        step["extra"] = {"harness": [_event(event) for event in events]}
    if ran and (moment := _moment(ran[0].started)):
        step["timestamp"] = moment


def _event(event: LogEvent) -> Json:
    return event.model_dump(mode="json", exclude_defaults=True)


def _moment(seconds: float | None) -> str:
    """ISO 8601; empty for what no clock shows."""
    return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds is not None and 0 <= seconds < 2**32 else ""


def _object(text: str) -> Json:
    """Arguments are usually an object; what the policy wrote instead is kept, as its text where it is no JSON or too deep to be sent."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if _deeper(value, _DEEPEST):
        value = text
    return value if isinstance(value, dict) else {"value": value}


def _deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())]
    return bool(layer)
