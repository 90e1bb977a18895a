"""Sub-agents and compaction of the harnesses that have them, through the real proxy: nothing is lost, and the task is solved."""

from __future__ import annotations

import pytest

from sandbox.harnesses.hands import HANDS, turn
from sandbox.harnesses.stage import Played
from sandbox.harnesses.verify import TITLE, repair_voice, task
from server.schemas.capture import BranchClass
from server.schemas.scripted import ScriptedTurn, Voice
from tests.sandbox.harnesses.support import played
from tests.sandbox.support import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime

PROMPT = "SUBTASK_A: list the files and report."
DELEGATE = {
    "claude-code": turn("Agent", description="Look", prompt=PROMPT, subagent_type="general-purpose"),
    "opencode": turn("task", description="Look", prompt=PROMPT, subagent_type="general"),
    "openhands": turn("task", description="Look", prompt=PROMPT, subagent_type="general-purpose"),
    "codex": turn("spawn_agent", message=PROMPT),
}
REPORT = {"openhands": turn("finish", message="REPORT_A")}
COMPACTION = {
    "claude-code": ("CRITICAL: Respond with TEXT ONLY", 130_000),
    "opencode": ("context summarization agent", 64_000),
    "openhands": ("maintaining a context-aware state summary", 52_000),
    "codex": ("CONTEXT CHECKPOINT COMPACTION", 90_000),
}
"""What the harness's own request says, and a context in which the output below overflows its window."""


def solved(run: Played) -> None:
    assert (run.outcome.kind, getattr(run.outcome, "reward", None), run.exit_code) == ("scored", 1, 0), (run.outcome, run.end.error)
    assert (run.end.record.violations, run.foreign_hosts, run.end.error) == ([], set(), "")
    assert not run.end.turn_cap_hit and not run.end.over_length


@pytest.mark.parametrize("name", DELEGATE)
def test_a_sub_agent_works_on_the_policy_in_a_branch_of_its_own(name: str) -> None:
    main = repair_voice(name, task())
    main = main.model_copy(update={"turns": [DELEGATE[name], *main.turns]})
    sub = Voice(name="sub", says=["SUBTASK_A"], turns=[HANDS[name].run("ls"), REPORT.get(name, ScriptedTurn(text="REPORT_A"))])
    run = played(name, [TITLE, main, sub])
    solved(run)
    assert (run.end.spoken["main"], run.end.spoken["sub"]) == (6, 2)
    assert [branch.sampled_tokens > 0 for branch in run.end.record.branches if branch.branch_class is BranchClass.SUB_AGENT] == [True]


@pytest.mark.parametrize("name", COMPACTION)
def test_a_conversation_that_outgrows_its_window_is_compacted_and_goes_on(name: str) -> None:
    bug, (marker, context) = task(), COMPACTION[name]
    main = repair_voice(name, bug)
    main = main.model_copy(update={"turns": [main.turns[0], *[HANDS[name].run("seq 1 5000")] * 3, *main.turns[1:]]})
    summary = ScriptedTurn(text=f"<analysis>\nSo far.\n</analysis>\n\n<summary>\nThe task: {bug.issue}\n</summary>")
    run = played(name, [TITLE, Voice(name="compact", says=[marker], turns=[summary]), main], context)
    solved(run)
    assert run.end.spoken["compact"] >= 1
    assert all(branch.tokens <= context for branch in run.end.record.branches)


def test_terminus_2_speaks_text_alone() -> None:
    """No system message, no tool and no call on the wire: user messages with the screen, and JSON in the text of the answers."""
    run = played("terminus-2", [repair_voice("terminus-2", task())])
    solved(run)
    turns = run.end.record.turns
    assert {role for turn in turns for role, _ in turn.context} == {"user"}
    assert not any(turn.tool_calls for turn in turns) and not run.end.record.unknown_fields
    assert [branch.branch_class for branch in run.end.record.branches] == [BranchClass.POLICY]


@pytest.mark.parametrize(
    ("outputs", "context"),
    [
        pytest.param(4, 40_000, id="before the window is full, by its own count"),
        pytest.param(2, 20_000, id="when the proxy refuses a request"),
    ],
)
def test_terminus_2_summarises_in_three_calls_and_goes_on(outputs: int, context: int) -> None:
    """A summary, questions by an agent that knows nothing else, and answers behind the summary: two branches beside the policy's."""
    main, wide = repair_voice("terminus-2", task()), HANDS["terminus-2"].run("echo $(seq 1 1800)")
    main = main.model_copy(update={"turns": [main.turns[0], *[wide] * outputs, *main.turns[1:]]})
    answers, summary, questions = (
        Voice(name=name, says=[says], unless=unless, turns=[ScriptedTurn(text=text)])
        for name, says, unless, text in (
            ("answers", "The next agent has a few questions for you", [], "ANSWERS: nothing was changed, the repair is left to do."),
            ("summary", "You are about to hand off your work", [], "SUMMARY: one bug in one file, which was not read yet."),
            ("questions", "Please begin by asking", ["Here are the answers"], "QUESTIONS: which function is wrong, and is it saved?"),
        )
    )
    run = played("terminus-2", [answers, summary, questions, main], context)
    solved(run)
    assert (run.end.spoken["summary"], run.end.spoken["questions"], run.end.spoken["answers"]) == (1, 1, 1)
    told = [(str(branch.reason), str(branch.branch_class)) for branch in run.end.record.branches]
    assert told == [("root", "policy"), ("summary", "summary"), ("summary", "summary"), ("compaction", "policy")]
    assert all(branch.tokens <= context for branch in run.end.record.branches)
