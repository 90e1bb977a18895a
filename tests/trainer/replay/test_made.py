"""What the shipped recordings do not show: each case is written down here and replayed like them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.schemas.runspec import TrainRule
from tests.trainer.replay.made import answer, assistant, chat, claude, result, system, use, used, user, write
from trainer.replay.plan import plan
from trainer.replay.play import Played
from trainer.replay.recording import BadRecording, load
from trainer.replay.report import Report, report

Replay = Callable[..., Report]


@pytest.fixture
def replay(tmp_path: Path, play: Callable[[Path], Played]) -> Replay:
    """Play exchanges; nothing may be wrong."""

    def run(*exchanges: dict[str, Any]) -> Report:
        made = report(play(write(tmp_path, *exchanges)), TrainRule.ALL_BRANCHES)
        assert made.violations == []
        return made

    return run


LS = ("id1", "bash", '{"command": "ls"}')
CAT = ("id2", "bash", '{"command": "cat calc.py"}')
TASK = [system(), user("fix it")]


def test_a_count_of_tokens_is_answered_and_leaves_no_turn(replay: Replay) -> None:
    """User-pain 19."""
    made = replay(claude([user("fix it")], path="/v1/messages/count_tokens"), claude([user("fix it")], {"type": "text", "text": "done"}))
    assert (made.skipped, made.branches, made.policy_turns) == (0, 1, 1)


def test_what_a_harness_kept_of_a_broken_answer_is_the_turn(replay: Replay) -> None:
    """Claude Code ran the finished call of a stream that broke, and went on; behind the proxy the stream would have ended there."""
    first = [user("fix it")]
    after = [*first, {"role": "assistant", "content": [used("a", "bash", command="ls")]}, answer("a")]
    broken = claude(first, use("a", "bash", '{"command": "ls"}'), use("b", "bash", '{"comm'), cut="tcp-reset")
    made = replay(broken, claude(after, {"type": "text", "text": "done"}))
    assert (made.skipped, made.branches, made.reasons, made.policy_turns) == (0, 1, {"root": 1}, 2)


def test_a_request_that_nobody_answered_is_skipped(replay: Replay) -> None:
    refused = chat([*TASK, assistant(LS), result("id1")], status=400, kind="error")
    made = replay(chat(TASK, LS), refused)
    assert (made.exchanges, made.skipped, made.branches, made.policy_turns) == (2, 1, 1, 1)


def test_a_length_retry_is_a_second_sample_and_the_first_is_not_trained(replay: Replay) -> None:
    """User-pain 13: qwen-code throws a turn away that was cut by length, and asks again with more room."""
    cut = chat(TASK, ("id1", "bash", '{"command": "l'), request={"max_tokens": 8000}, body={"choices": [{"finish_reason": "length"}]})
    again = chat(TASK, LS, request={"max_tokens": 32768})
    made = replay(cut, again, chat([*TASK, assistant(LS), result("id1")], say="done"))
    assert (made.threads, made.branches, made.reasons, made.undelivered) == (1, 2, {"root": 1, "retry": 1}, 1)
    assert made.trained_tokens < made.sampled_tokens


def test_a_pruned_tool_output_starts_a_branch(replay: Replay) -> None:
    """OpenCode replaces old outputs by a mark. User-pain 3: a prefix that broke is a branch with a reason, never a failure."""
    grown = [*TASK, assistant(LS), result("id1", "a long listing"), assistant(text="ok?"), user("go on")]
    pruned = [*TASK, assistant(LS), result("id1", "[Old tool result content cleared]"), assistant(text="ok?"), user("go on")]
    steps = [chat(TASK, LS), chat(grown[:4], say="ok?"), chat(grown, CAT), chat([*pruned, assistant(CAT), result("id2")], say="done")]
    made = replay(*steps)
    assert (made.threads, made.branches, made.reasons) == (1, 2, {"root": 1, "history_edited": 1})


def test_agents_in_the_background_run_while_the_parent_goes_on(replay: Replay, play: Callable[[Path], Played]) -> None:
    task = use("t", "task", '{"prompt": "look"}')
    child = {"x-claude-code-agent-id": "agent-1"}
    first, look = [user("fix it")], [user("look")]
    later = [*first, {"role": "assistant", "content": [used("t", "task", prompt="look")]}, answer("t", "started")]
    made = replay(
        claude(first, task, t=1.0, t_end=1.5),
        claude(look, use("r", "read", "{}"), headers=child, label="sub:A", t=2.0, t_end=4.0),
        claude(later, use("b", "bash", "{}"), t=2.5, t_end=3.0),
        claude([*look, {"role": "assistant", "content": [used("r", "read")]}, answer("r")], {"type": "text", "text": "report"},
               headers=child, label="sub:A", t=4.5, t_end=5.0),
    )  # fmt: skip
    assert (made.threads, made.branches, made.reasons) == (2, 2, {"root": 1, "sub_agent": 1})


def test_a_nested_agent_is_a_thread_of_its_own(replay: Replay) -> None:
    child, inner = {"x-claude-code-agent-id": "a"}, {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"}
    made = replay(
        claude([user("fix it")], use("t", "task", "{}")),
        claude([user("look")], use("u", "task", "{}"), headers=child, label="sub:A"),
        claude([user("look closer")], {"type": "text", "text": "seen"}, headers=inner, label="sub:B"),
    )
    assert (made.threads, made.branches, made.classes) == (3, 3, {"policy": 1, "sub_agent": 2})


def test_a_finished_agent_that_is_asked_again_with_fewer_tools_keeps_its_thread(replay: Replay) -> None:
    """Claude Code resumes an agent with a shorter tool list and without a system message. User-pain 17: a branch, not a silent rebuild."""
    child, look = {"x-claude-code-agent-id": "a"}, [user("look"), system("agents: x")]
    again = [user("look"), {"role": "assistant", "content": "seen"}, user("look again")]
    made = replay(
        claude([user("fix it")], use("t", "task", "{}")),
        claude(look, {"type": "text", "text": "seen"}, headers=child, label="sub:A"),
        claude(again, {"type": "text", "text": "seen twice"}, headers=child, tools=("bash",), label="sub:A"),
    )
    assert (made.threads, made.branches, made.classes) == (2, 3, {"policy": 1, "sub_agent": 2})


def test_an_id_that_was_recorded_twice_is_two_ids_behind_the_proxy(replay: Replay) -> None:
    """A second session of the same run minted ids that the first had used; the harness kept both."""
    one, two = ("call", "bash", '{"command": "ls"}'), ("call", "bash", '{"command": "pwd"}')
    second = [*TASK, assistant(one), result("call", "a")]
    made = replay(chat(TASK, one), chat(second, two), chat([*second, assistant(two), result("call", "b")], say="done"))
    assert (made.branches, made.reasons) == (1, {"root": 1})


def test_a_resumed_session_may_mint_an_id_that_its_history_has(replay: Replay) -> None:
    """The history of an earlier run is context, and the id in it stays what it was."""
    old, new = ("call_0001", "bash", '{"command": "ls"}'), ("call_0001", "bash", '{"command": "pwd"}')
    resumed = [*TASK, assistant(old), result("call_0001", "a"), user("go on")]
    made = replay(chat(resumed, new), chat([*resumed, assistant(new), result("call_0001", "b")], say="done"))
    assert (made.branches, made.reasons, made.policy_turns) == (1, {"root": 1}, 2)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_compaction_without_an_effect_is_a_summary_all_the_same(replay: Replay, turns: int) -> None:
    """qwen-code ignores a summary that is longer than what it replaces; the newest turns are left out of what is summed up."""
    opening = [system(), user("You run on Linux."), assistant(text="Got it. Thanks for the context!"), user("fix it")]
    grown = [*opening, assistant(LS), result("id1", "a listing")]
    copied = grown[1 : 4 + 2 * turns]
    asked = [system("You compress a chat into a <state_snapshot>."), *copied, user("First, reason, then write the <state_snapshot>.")]
    steps = [chat(opening, LS), chat(asked, say="<state_snapshot>long</state_snapshot>", tools=(), label="compact"), chat(grown, CAT)]
    made = replay(*steps)
    assert (made.threads, made.branches, made.classes) == (1, 2, {"policy": 1, "summary": 1})


def test_a_turn_that_a_flat_history_quotes_is_no_summary(replay: Replay) -> None:
    """Without tools anywhere, a history in one text quotes every turn, but what led to a summary (Terminus 2) is quoted alone."""
    one, two, summary = "I will look at the file first.", "The file has one function.", "So far: looked, found one function."
    grown = [*TASK, assistant(text=one), user("it has a function"), assistant(text=two), user("go on")]
    flat = [user(f"Sum up.\nassistant: {one}\nuser: it has a function\nassistant: {two}")]
    asked = chat(flat, say=summary, tools=(), label="compact")
    after = [*TASK, user(f"Earlier: {summary}")]
    said = [chat(TASK, say=one, tools=()), chat(grown[:4], say=two, tools=()), asked, chat(after, say="Repaired it, all done.", tools=())]
    made = replay(*said)
    assert (made.reasons, made.classes) == ({"compaction": 1, "root": 1, "summary": 1}, {"policy": 2, "summary": 1})


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_is_hidden_and_its_retry_would_not_have_happened(replay: Replay, late: bool) -> None:
    """User-pain 23, 24: three faults in a row, before or behind the first content; the harness sees one answer."""
    after = [*TASK, assistant(LS), result("id1")]
    begun = {"events": [{"data": {"choices": [{"delta": {"content": "half"}}]}}]} if late else {}
    broken = chat(after, say="half", cut="tcp-reset", kind="sse", request={"stream": True}, **begun)
    overloaded = chat(after, status=529, kind="error")
    made = replay(chat(TASK, LS), broken, overloaded, overloaded, chat(after, CAT, say="a whole turn that takes more than a few tokens"))
    assert (made.exchanges, made.skipped, made.branches, made.policy_turns, made.undelivered) == (5, 3, 1, 2, 0)


def test_a_harness_that_hangs_up_does_so_again(replay: Replay) -> None:
    """User-pain 25: the call is cancelled, nothing of it is trained, and the next try is a call of its own."""
    gone = chat(TASK, LS, client_gone="CancelledError")
    made = replay(gone, chat(TASK, CAT), chat([*TASK, assistant(CAT), result("id2")], say="done"))
    assert (made.skipped, made.reasons, made.policy_turns, made.undelivered) == (0, {"root": 1}, 2, 0)


def test_requests_wait_for_what_they_were_recorded_after(tmp_path: Path) -> None:
    quoting = chat([*TASK, assistant(LS), result("id1")], say="quotes an id", t=1.1, t_end=1.2)
    path = write(tmp_path, chat(TASK, LS, t=1.0, t_end=5.0), chat(TASK, say="meanwhile", t=2.0, t_end=3.0), quoting)
    first, second, third = plan(load(path))
    assert (second.after, first.meanwhile) == ([], [second])
    assert third.after == [first]


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"i": 1}) + "\n")
    with pytest.raises(BadRecording, match=r"x.jsonl:1 is no recorded exchange: KeyError 't'"):
        load(path)
