"""A trial's capture as an ATIF trajectory (Agent Trajectory Interchange Format, version 1.8), the same for every harness.

What the policy's calls sent and sampled is all there is to it, so nobody has to read a harness's own log. The parent's conversation is the
trajectory; sub-agents, summaries and side calls are trajectories within it.
"""

from __future__ import annotations

import json
from typing import Any

from ..schemas.capture import BranchClass, BranchRecord, CaptureRecord, TurnRecord

Json = dict[str, Any]


def trajectory(record: CaptureRecord, version: str, result: Json) -> Json:
    """`version` is the harness's; `result` goes into the trajectory's `extra`. Raises ValueError when nothing was sampled."""
    if not record.turns:
        raise ValueError(f"the harness of {record.trial_id} made no model call: there is no trajectory")
    parent = [branch for branch in record.branches if branch.branch_class is BranchClass.POLICY]
    others = [branch for branch in record.branches if branch not in parent]
    agent = {"name": record.harness, "version": version, "model_name": "policy"}
    whole: Json = {"schema_version": "ATIF-v1.8", "session_id": record.trial_id, "trajectory_id": "parent", "agent": agent}
    whole["steps"] = _steps(record, parent or others[:1])
    owning = {turn.branch for turn in record.turns}
    if within := [branch for branch in (others if parent else others[1:]) if branch.index in owning]:
        whole["subagent_trajectories"] = [_within(record, branch, agent) for branch in within]
    whole["final_metrics"] = {
        "total_prompt_tokens": sum(turn.prompt_tokens for turn in record.turns),
        "total_completion_tokens": record.sampled_tokens,
        "total_steps": len(whole["steps"]),
    }
    return whole | {"extra": result | {"violations": record.violations}}


def _within(record: CaptureRecord, branch: BranchRecord, agent: Json) -> Json:
    extra = {"class": branch.branch_class.value, "reason": branch.reason.value, "excluded": branch.excluded}
    steps = _steps(record, [branch])
    return {"schema_version": "ATIF-v1.8", "trajectory_id": f"branch-{branch.index}", "agent": agent, "steps": steps, "extra": extra}


def _steps(record: CaptureRecord, branches: list[BranchRecord]) -> list[Json]:
    """Steps of the branches' turns, in the order of the calls."""
    wanted, steps = {branch.index for branch in branches}, list[Json]()
    for turn in record.turns:
        if turn.branch in wanted:
            _add_context(steps, turn)
            steps.append(_sampled(turn))
    return [{"step_id": number} | step for number, step in enumerate(steps, 1)]


def _add_context(steps: list[Json], turn: TurnRecord) -> None:
    """What was new to a call: tool results belong to the step before them, everything else is a step of its own."""
    for role, text in turn.context:
        if role == "tool":
            if not steps or steps[-1]["source"] == "user":
                steps.append({"source": "system", "message": ""})
            calls = steps[-1].get("tool_calls", [])
            # Results of calls in parallel come back in the order of their completion, and the record does not say whose they are.
            asked = calls[0]["tool_call_id"] if len(calls) == 1 else None
            steps[-1].setdefault("observation", {"results": []})["results"].append({"source_call_id": asked, "content": text})
        elif role == "assistant":
            steps.append({"source": "agent", "message": text, "is_copied_context": True})
        else:
            steps.append({"source": "system" if role == "system" else "user", "message": text})


def _sampled(turn: TurnRecord) -> Json:
    facts = {"finish": turn.finish, "delivered": turn.delivered, "branch": turn.branch, "policy_version": turn.policy_version}
    step: Json = {"source": "agent", "message": turn.text, "llm_call_count": 1}
    step["metrics"] = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.sampled_tokens, "extra": facts}
    if turn.reasoning is not None:
        step["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": _object(call.arguments)} for call in turn.tool_calls
        ]
    return step


def _object(text: str) -> Json:
    """Arguments are usually an object; what the policy wrote instead is kept as its text."""
    value = json.loads(text)
    return value if isinstance(value, dict) else {"value": value}
