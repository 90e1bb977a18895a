from __future__ import annotations

import json

import pytest
from fastapi.encoders import jsonable_encoder

from server.runs.atif import trajectory
from server.schemas.capture import BranchClass, BranchReason, BranchRecord, CaptureRecord, ToolCallRecord, TurnRecord
from server.schemas.harnesslog import HarnessLog, LogEvent, LogEventKind


def turn(index: int, branch: int, context: list[tuple[str, str]], *calls: str, text: str = "", answers: str = "") -> TurnRecord:
    records = [ToolCallRecord(id=f"c{index}{i}", name="bash", arguments=arguments) for i, arguments in enumerate(calls)]
    return TurnRecord(
        index=index,
        branch=branch,
        context=context,
        answers=answers.split(","),
        text=text,
        tool_calls=records,
        prompt_tokens=10 * index,
        sampled_tokens=2,
        finish="stop",
    )


def branch(index: int, reason: BranchReason, branch_class: BranchClass) -> BranchRecord:
    return BranchRecord(index=index, reason=reason, branch_class=branch_class, tokens=9, sampled_tokens=2)


RECORD = CaptureRecord(
    trial_id="t-0",
    harness="claude-code",
    turns=[
        turn(0, 0, [("system", "You fix code."), ("user", "Repair it.")], '{"command": "ls"}', '"pwd"', text="I look."),
        turn(1, 1, [("user", "Sub-task.")], text="Report."),
        turn(2, 0, [("tool", "a.py"), ("tool", "/workspace"), ("user", "Go on.")], '{"command": "true"}', answers="c01,c00,"),
        turn(3, 2, [("user", "Summary so far."), ("assistant", "I looked."), ("tool", "b.py")], text="Done.", answers=",,c20"),
    ],
    branches=[
        branch(0, BranchReason.ROOT, BranchClass.POLICY),
        branch(1, BranchReason.SUB_AGENT, BranchClass.SUB_AGENT),
        branch(2, BranchReason.COMPACTION, BranchClass.POLICY),
    ],
    sampled_tokens=8,
)


def test_a_capture_becomes_a_trajectory() -> None:
    found = trajectory(RECORD, "2.1.332", {"task": "onebug"})
    assert [(step["step_id"], step["source"], step["message"]) for step in found["steps"]] == [
        (1, "system", "You fix code."),
        (2, "user", "Repair it."),
        (3, "agent", "I look."),
        (4, "user", "Go on."),
        (5, "agent", ""),
        (6, "user", "Summary so far."),
        (7, "agent", "I looked."),
        (8, "agent", "Done."),
    ]
    asked = found["steps"][2]
    assert [call["arguments"] for call in asked["tool_calls"]] == [{"command": "ls"}, {"value": "pwd"}]
    assert asked["observation"] == {
        "results": [{"source_call_id": "c01", "content": "a.py"}, {"source_call_id": "c00", "content": "/workspace"}]
    }, "in the order of their completion"
    assert "observation" not in found["steps"][4]  # its result is not in the summary's context
    assert found["steps"][6]["observation"]["results"] == [{"source_call_id": None, "content": "b.py"}]
    assert found["steps"][6]["is_copied_context"] and "metrics" not in found["steps"][6]
    (sub,) = found["subagent_trajectories"]
    assert (sub["trajectory_id"], [step["message"] for step in sub["steps"]]) == ("branch-1", ["Sub-task.", "Report."])
    assert found["final_metrics"] == {"total_prompt_tokens": 60, "total_completion_tokens": 8, "total_steps": 8}
    assert found["extra"] == {"task": "onebug", "violations": []}


@pytest.mark.parametrize(
    "deep", ["[" * 100_000 + "]" * 100_000, '{"a":' * 300 + "1" + "}" * 300, "[" * 1_400 + "]" * 1_400, "9" * 5_000, "{not", ""]
)
def test_arguments_that_nobody_could_read_are_shown_as_they_are(deep: str) -> None:
    """And an answer of this server can hold them."""
    record = RECORD.model_copy(update={"log": LOG}, deep=True)
    for call in record.turns[0].tool_calls:
        call.arguments = deep
    assert [call["arguments"] for call in trajectory(record, "1", {})["steps"][2]["tool_calls"]] == [{"value": deep}] * 2
    assert json.dumps(jsonable_encoder(trajectory(record, "1", {})))


def test_it_is_what_the_format_says() -> None:
    models = pytest.importorskip("harbor.models.trajectories.trajectory")
    parsed = models.Trajectory.model_validate(trajectory(RECORD, "2.1.332", {}))
    assert parsed.agent.name == "claude-code" and len(parsed.steps) == 8


def test_without_a_model_call_there_is_none() -> None:
    with pytest.raises(ValueError, match="made no model call"):
        trajectory(RECORD.model_copy(update={"turns": []}), "1", {})


LOG = HarnessLog(
    version="2.1.332",
    end="completed",
    exit_code=0,
    turns=3,
    malformed=1,
    events=[
        LogEvent(kind=LogEventKind.ERROR, text="before anything"),
        LogEvent(kind=LogEventKind.TOOL, call_id="c00", started=1_000.0, seconds=0.5, ok=False),
        LogEvent(kind=LogEventKind.TOOL, call_id="c00", seconds=9.0),
        LogEvent(kind=LogEventKind.SUB_AGENT, call_id="c01", name="explore"),
        LogEvent(kind=LogEventKind.TOOL, call_id="of nobody"),
        LogEvent(kind=LogEventKind.TOOL, call_id="c20", started=-1e14, seconds=0.25),
        LogEvent(kind=LogEventKind.COMPACTION),
        LogEvent(kind=LogEventKind.TOOL, turn=0, name="keys"),
        LogEvent(kind=LogEventKind.TOOL, turn=99, name="of no turn"),
    ],
)


def test_what_the_harness_s_log_adds_stands_where_it_happened() -> None:
    record = RECORD.model_copy(update={"log": LOG}, deep=True)
    record.turns[0].tool_calls[1].arguments = '{"prompt": "Sub-task.", "type": "x"}'
    found = trajectory(record, "2.1.332", {})
    first, last = found["steps"][2], found["steps"][4]
    assert first["tool_calls"][0]["extra"] == {"started": 1_000.0, "seconds": 0.5, "ok": False}, "what is told first counts"
    assert first["timestamp"] == "1970-01-01T00:16:40+00:00"
    assert [event["kind"] for event in first["extra"]["harness"]] == ["sub_agent", "tool"]
    assert first["observation"]["results"][0] == {"source_call_id": "c01", "subagent_trajectory_ref": [{"trajectory_id": "branch-1"}]}
    assert last["tool_calls"][0]["extra"] == {"started": -1e14, "seconds": 0.25} and "timestamp" not in last
    assert [event["kind"] for event in last["extra"]["harness"]] == ["compaction", "tool"]
    said = found["extra"]["harness"]
    assert (said["end"], said["exit_code"], said["turns"], said["malformed"]) == ("completed", 0, 3, 1)
    assert [event.get("text") or event["call_id"] for event in said["events"]] == ["before anything", "c00", "of nobody"]
    assert found["final_metrics"] == trajectory(RECORD, "2.1.332", {})["final_metrics"]
    models = pytest.importorskip("harbor.models.trajectories.trajectory")
    models.Trajectory.model_validate(found)
