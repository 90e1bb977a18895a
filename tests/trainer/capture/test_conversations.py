"""What harnesses do to a conversation, as short scripts: which branches that gives, why, of which class, and what each rule trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from server.schemas.capture import BranchClass, BranchReason, Drift, Exclusion
from server.schemas.runspec import History, TrainRule
from tests.trainer.audit import audit
from tests.trainer.scripted import ScriptedEngine, call, calls, say
from trainer.capture.capture import Capture
from trainer.capture.graph import Turn
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import KindHint, Request
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.vocabulary import byte_level

TOKENIZER = byte_level()
SYSTEM, TASK = Message("system", "You fix code."), Message("user", "Fix it.")
SUMMARY = "Read calc.py; add() must be repaired."
Script = Callable[["Talk"], Coroutine[Any, Any, None]]


@dataclass
class Talk:
    """A harness that keeps `history` and may send whatever it likes instead."""

    session: Session
    engine: ScriptedEngine
    history: list[Message] = field(default_factory=lambda: [SYSTEM, TASK])

    async def ask(
        self, answer: str, messages: list[Message] | None = None, tools: str = "bash read", thread: str = "", hint: KindHint = ""
    ) -> Turn:
        self.engine.script = [answer]
        listed = [{"type": "function", "function": {"name": name, "description": name, "parameters": {}}} for name in tools.split()]
        request = Request(tuple(self.history if messages is None else messages), listed, "m", thread=thread, kind_hint=hint)
        turn = await self.session.answer(request)
        turn.sent = True
        return turn

    async def work(self, answer: str, result: str = "ok", tools: str = "bash read") -> Turn:
        """One turn as it should be."""
        turn = await self.ask(answer, tools=tools)
        self.history += [turn.message, *results(turn, result)]
        return turn


def results(turn: Turn, text: str = "ok") -> list[Message]:
    return [Message("tool", text, tool_call_id=call.id) for call in turn.message.tool_calls]


def play(script: Script, *, thinking: bool = False, history: History = History.KEEP) -> Capture:
    rendering, engine = Rendering(TOKENIZER, thinking=thinking, history=history), ScriptedEngine(TOKENIZER, routes=False)
    sampling = Sampling(1.0, 400, rendering.stop_token_ids)

    async def run() -> Capture:
        session = Session("r-1", "key", engine, rendering, sampling, Limits(max_turns=40, context=9000), harness="test")
        await script(Talk(session, engine))
        return await session.close()

    capture = asyncio.run(run())
    audit(capture, engine)
    return capture


def branches(capture: Capture) -> list[tuple[str, str, list[int]]]:
    return [(str(b.reason), str(b.branch_class), [turn.index for turn in b.owned]) for b in capture.branches()]


async def title_first(talk: Talk) -> None:
    """OpenCode and Claude Code name the session before the first turn, in the same thread."""
    await talk.ask(say("A title"), [Message("system", "Make a title."), TASK], tools="")
    await talk.work(call("bash", n=1))
    await talk.work(say("Done."))


async def compacted_in_place(talk: Talk) -> None:
    """Claude Code: the newest turn is left out of the summary's context and kept in the new history; only <summary> is kept."""
    await talk.work(call("bash", n=1))
    before = list(talk.history)
    newest = await talk.work(call("bash", n=2))
    asked = [*before, Message("user", "Summarise.")]
    await talk.ask(say(f"<analysis>hm</analysis>\n<summary>\n{SUMMARY}\n</summary>"), asked)
    talk.history = [SYSTEM, Message("user", f"Continued: {SUMMARY} Go on."), newest.message, *results(newest)]
    await talk.work(call("bash", n=3))
    await talk.work(say("Done."))


async def compacted_apart(talk: Talk) -> None:
    """OpenCode: its own system prompt, no tools, one flat text; the summary comes back as an assistant message."""
    await talk.work(call("bash", n=1))
    await talk.ask(say(SUMMARY), [Message("system", "You compact."), Message("user", "[User]: Fix it. …")], tools="")
    talk.history = [SYSTEM, Message("user", "What did we do?"), Message("assistant", SUMMARY), Message("user", "Continue.")]
    await talk.work(call("bash", n=3))


async def condensed(talk: Talk) -> None:
    """OpenHands: the first events stay, the summary is one more user message behind them."""
    await talk.work(call("bash", n=1))
    kept = list(talk.history)
    await talk.work(call("bash", n=2))
    await talk.ask(say(SUMMARY), [Message("system", "You condense."), Message("user", "events")], tools="")
    talk.history = [*kept, Message("user", SUMMARY)]
    await talk.work(say("Done."))


async def summary_without_effect(talk: Talk) -> None:
    """qwen-code ignores a summary that is longer than what it replaces."""
    await talk.work(call("bash", n=1))
    await talk.ask(say(SUMMARY), [Message("system", "You compact."), *talk.history[1:], Message("user", "Summarise.")], tools="")
    await talk.work(say("Done."))


async def pruned(talk: Talk) -> None:
    """OpenCode clears old tool outputs. Texts have no id and are known by their words."""
    await talk.work(call("bash", n=1), "long output")
    await talk.work(say("First part done."))
    talk.history.append(Message("user", "Go on."))
    await talk.work(call("bash", n=2))
    talk.history = [Message("tool", "[cleared]", tool_call_id=m.tool_call_id) if m.content == "long output" else m for m in talk.history]
    await talk.work(say("Done."))


async def phantom(talk: Talk) -> None:
    """OpenCode puts the part of a turn that it had before the stream broke in front of the turn that took its place."""
    await talk.work(call("bash", n=1))
    half = await talk.ask(calls(("bash", {"n": 2}), ("read", {"n": 3})))
    half.sent = False
    cut = Message("assistant", "", half.message.tool_calls[:1])
    talk.history.append(Message("user", "again"))
    newest = await talk.ask(call("bash", n=4))
    talk.history[-1:] = [cut, *results(half)[:1], newest.message, *results(newest)]
    await talk.work(say("Done."))


async def vanished(talk: Talk) -> None:
    """Claude Code takes an empty turn out and writes a note into the user message before it."""
    await talk.ask(say(""))
    talk.history[-1] = Message("user", "Fix it.\n[Your previous response had no visible output.]")
    await talk.work(say("Done."))


async def dropped(talk: Talk) -> None:
    """mini-swe-agent answers a turn without a call with an error message in its place."""
    await talk.work(call("bash", n=1))
    await talk.ask(say("no call"))
    talk.history.append(Message("user", "Format error."))
    await talk.work(call("bash", n=2))


async def tools_changed(talk: Talk) -> None:
    """Claude Code resumes a finished agent with fewer tools."""
    await talk.work(call("bash", n=1))
    await talk.ask(say("Done."), tools="bash")


async def agents(talk: Talk) -> None:
    """With headers: two at once with one prompt, one of them resumed."""
    await talk.work(call("bash", n=1))
    look = [Message("system", "You look."), Message("user", "Look.")]
    one = await talk.ask(call("read", n=1), look, tools="read", thread="a")
    await talk.ask(call("read", n=2), look, tools="read", thread="b")
    look += [one.message, *results(one)]
    done = await talk.ask(say("Seen."), look, tools="read", thread="a")
    await talk.ask(say("Again."), [*look, done.message, Message("user", "And now?")], tools="read", thread="a")
    await talk.work(say("Done."))


async def nameless_agents(talk: Talk) -> None:
    """qwen-code sends no thread header: an agent has its own system prompt and tools, a second one its own task."""
    await talk.work(call("bash", n=1))
    for task in ("Look here.", "Look there."):
        look = [Message("system", "You look."), Message("user", "Context."), Message("assistant", "Got it."), Message("user", task)]
        turn = await talk.ask(call("read", n=1), look, tools="read")
        await talk.ask(say(f"Seen what was to be seen: {task}"), [*look, turn.message, *results(turn)], tools="read")
    await talk.work(say("Done."))


async def ended_by_its_summary(talk: Talk) -> None:
    """The turns run out behind the summary, so nothing quotes it; the policy itself said nothing that it could be known by."""
    await talk.work(call("bash", n=1), "README.md calc.py tests")
    await talk.work(call("bash", n=2))
    flat = "[User]: Fix it.\n[Assistant tool call]: bash(1)\n[Tool result]: README.md calc.py tests\n[Assistant tool call]: bash(2)"
    await talk.ask(say(SUMMARY), [Message("system", "You compact."), Message("user", flat)], tools="")


async def compacted_beside_an_agent(talk: Talk) -> None:
    """A nameless agent in the background answers between the summary and the turn that quotes it."""
    await talk.work(call("bash", n=1))
    look = [Message("system", "You look."), Message("user", "Look here.")]
    turn = await talk.ask(call("read", n=1), look, tools="read")
    await talk.ask(say(SUMMARY), [*talk.history, Message("user", "Summarise.")])
    await talk.ask(say("Seen what was to be seen."), [*look, turn.message, *results(turn)], tools="read")
    talk.history = [SYSTEM, Message("user", f"Continued: {SUMMARY}")]
    await talk.work(say("Done."))


async def memory_agent(talk: Talk) -> None:
    """qwen-code lets an agent read the finished conversation; two turns, nothing of which comes back."""
    await talk.work(call("bash", n=1))
    await talk.work(say("All of it is done."))
    reads = [Message("system", "You remember."), *talk.history[1:], Message("user", "What is worth keeping?")]
    turn = await talk.ask(call("save", n=1), reads, tools="save")
    await talk.ask(say("Kept."), [*reads, turn.message, *results(turn)], tools="save")


async def web_search(talk: Talk) -> None:
    """Claude Code searches by a nested call with a tool of the provider's; the dialect says so."""
    await talk.work(call("bash", n=1))
    await talk.ask(say("Found."), [Message("user", "Perform a web search for the query: x")], tools="web_search", hint="auxiliary")
    await talk.work(say("Done."))


async def retried(talk: Talk) -> None:
    """The first answer was thrown away although it had arrived: the one that comes back is the turn."""
    await talk.ask(call("bash", n=1))
    await talk.work(call("bash", n=2))
    await talk.work(say("Done."))


async def agent_of_the_parents_kind(talk: Talk) -> None:
    """Without headers, with the parent's own system prompt and tools: the parent goes on where it was."""
    await talk.work(call("task", n=1), tools="task read")
    look = [SYSTEM, Message("user", "Look here.")]
    turn = await talk.ask(call("read", n=2), look, tools="task read")
    await talk.ask(say("Seen what was to be seen."), [*look, turn.message, *results(turn)], tools="task read")
    await talk.work(say("Done."), tools="task read")


async def examples_edited(talk: Talk) -> None:
    """The harness made the ids of its examples up itself, so they say nothing about the words."""
    shown = [Message("assistant", "", (ToolCall("example", "bash", {"n": 0}),)), Message("tool", "ok", tool_call_id="example")]
    talk.history = [SYSTEM, Message("user", "An example."), *shown, TASK]
    await talk.work(call("bash", n=1))
    talk.history[2] = Message("assistant", "", (ToolCall("example", "bash", {"n": 9}),))
    await talk.work(say("Done."))


async def title_at_the_end(talk: Talk) -> None:
    """It quotes the answer that it names, and nothing else of the history."""
    await talk.work(call("bash", n=1), "README.md calc.py tests")
    await talk.work(say("All of it is done now."))
    ask = [Message("system", "Name it."), Message("user", "Fix it.\nAll of it is done now.")]
    await talk.ask(say("Repair of add"), ask, tools="")


EXPECTED: list[tuple[Script, list[tuple[str, str, list[int]]]]] = [
    (title_first, [("auxiliary", "auxiliary", [0]), ("root", "policy", [1, 2])]),
    (compacted_in_place, [("root", "policy", [0, 1]), ("summary", "summary", [2]), ("compaction", "policy", [3, 4])]),
    (compacted_apart, [("root", "policy", [0]), ("summary", "summary", [1]), ("compaction", "policy", [2])]),
    (condensed, [("root", "policy", [0, 1]), ("summary", "summary", [2]), ("compaction", "policy", [3])]),
    (summary_without_effect, [("root", "policy", [0, 2]), ("summary", "summary", [1])]),
    (pruned, [("root", "policy", [0, 1, 2]), ("history_edited", "policy", [3])]),
    (phantom, [("root", "policy", [0, 2]), ("malformed_turn", "policy", [1]), ("history_edited", "policy", [3])]),
    (vanished, [("root", "policy", [0]), ("history_edited", "policy", [1])]),
    (dropped, [("root", "policy", [0, 2]), ("malformed_turn", "policy", [1])]),
    (tools_changed, [("root", "policy", [0]), ("tools_changed", "policy", [1])]),
    (agents, [("root", "policy", [0, 5]), ("sub_agent", "sub_agent", [1, 3, 4]), ("sub_agent", "sub_agent", [2])]),
    (nameless_agents, [("root", "policy", [0, 5]), ("sub_agent", "sub_agent", [1, 2]), ("sub_agent", "sub_agent", [3, 4])]),
    (ended_by_its_summary, [("root", "policy", [0, 1]), ("summary", "summary", [2])]),
    (
        compacted_beside_an_agent,
        [("root", "policy", [0]), ("sub_agent", "sub_agent", [1, 3]), ("summary", "summary", [2]), ("compaction", "policy", [4])],
    ),
    (memory_agent, [("root", "policy", [0, 1]), ("auxiliary", "auxiliary", [2, 3])]),
    (web_search, [("root", "policy", [0, 2]), ("auxiliary", "auxiliary", [1])]),
    (retried, [("retry", "policy", [0]), ("root", "policy", [1, 2])]),
    (agent_of_the_parents_kind, [("root", "policy", [0, 3]), ("sub_agent", "sub_agent", [1, 2])]),
    (examples_edited, [("root", "policy", [0]), ("history_edited", "policy", [1])]),
    (title_at_the_end, [("root", "policy", [0, 1]), ("auxiliary", "auxiliary", [2])]),
]


@pytest.mark.parametrize(("script", "expected"), EXPECTED, ids=[script.__name__ for script, _ in EXPECTED])
def test_every_habit_of_a_harness_gives_its_branches(script: Script, expected: list[tuple[str, str, list[int]]]) -> None:
    assert branches(play(script)) == expected


@pytest.mark.parametrize(("script", "expected"), EXPECTED, ids=[script.__name__ for script, _ in EXPECTED])
def test_parent_exact_trains_the_parent_until_its_history_is_another_one(
    script: Script, expected: list[tuple[str, str, list[int]]]
) -> None:
    """The paper's rule: sub-agents are isolated, what follows a rewritten history is left out and counted (3.2.2, 4.4)."""
    excluded = {branch.reason: branch.excluded for branch in play(script).branches(TrainRule.PARENT_EXACT)}
    assert excluded.pop(BranchReason.ROOT) is None
    others = {
        BranchReason.SUB_AGENT: Exclusion.OTHER_THREAD,
        BranchReason.AUXILIARY: Exclusion.AUXILIARY,
        BranchReason.RETRY: Exclusion.UNDELIVERED,
    }
    undelivered = script is phantom and excluded.pop(BranchReason.MALFORMED_TURN) is Exclusion.UNDELIVERED
    assert undelivered == (script is phantom)
    assert excluded == {reason: others.get(reason, Exclusion.UNALIGNED) for reason in excluded}


@pytest.mark.parametrize("script", [script for script, _ in EXPECTED])
def test_all_branches_trains_what_was_received_except_side_calls(script: Script) -> None:
    capture = play(script)
    for branch in capture.branches(TrainRule.ALL_BRANCHES):
        if branch.branch_class is BranchClass.AUXILIARY:
            assert branch.excluded is Exclusion.AUXILIARY
        else:
            assert branch.excluded is (Exclusion.UNDELIVERED if branch.owned[0].index in lost(capture) else None)


def lost(capture: Capture) -> set[int]:
    return {turn.index for turn in capture.graph.turns if not turn.returned and (not turn.sent or is_rival(turn, capture))}


def is_rival(turn: Turn, capture: Capture) -> bool:
    return any(other.call == turn.call and other.returned for other in capture.graph.turns)


def test_an_edit_keeps_the_ids_of_all_that_came_before_it() -> None:
    """A phantom turn stands behind a sampled one: the new branch begins with the sampled ids, and the rest is as the template has it."""
    sent: list[Message] = []

    async def script(talk: Talk) -> None:
        await phantom(talk)
        sent.extend(talk.history[:-1])

    first, *_, edited = play(script).graph.turns
    assert first in edited.path()
    prompt = [token for node in edited.path() for token in node.ids.tolist()][: edited.prompt_tokens]
    tools = [{"type": "function", "function": {"name": name, "description": name, "parameters": {}}} for name in ("bash", "read")]
    assert prompt == Rendering(TOKENIZER).render(sent, tools).ids  # this tokenizer spells a text in one way only


def test_strip_forks_at_a_user_message_and_keep_extends() -> None:
    """User-pain 2: with `strip` the next prompt is the template's, on a branch that shares what is before the first stripped turn."""

    async def script(talk: Talk) -> None:
        await talk.work("<think>\nhm\n</think>\n\n" + call("bash", n=1))
        await talk.work("<think>\nwell\n</think>\n\n" + say("Done with the first."))
        talk.history.append(Message("user", "And the second?"))
        await talk.work(call("bash", n=2))
        await talk.work(say("Done."))

    kept = play(script, thinking=True)
    assert branches(kept) == [("root", "policy", [0, 1, 2, 3])]
    stripped = play(script, thinking=True, history=History.STRIP)
    assert branches(stripped) == [("root", "policy", [0, 1]), ("template_strip", "policy", [2, 3])]
    text = TOKENIZER.decode(stripped.samples()[1].tokens.tolist(), skip_special_tokens=False)
    assert "hm" not in text and "well" not in text and "Done with the first." in text
    shared = [node for node in stripped.graph.turns[2].path() if node in stripped.graph.turns[0].path()]
    assert [node.message.content for node in shared] == ["", SYSTEM.content, TASK.content]
    assert [b.excluded for b in stripped.branches(TrainRule.PARENT_EXACT)] == [None, Exclusion.UNALIGNED]


@pytest.mark.parametrize(
    ("sampled", "echoed", "drift"),
    [
        ({"a": 1, "b": "x"}, {"a": 1, "b": "x"}, None),
        ({"a": 1, "b": "x"}, {"b": "x", "a": 1}, Drift.RESERIALISED),
        ({"n": 1.0, "m": -0.0}, {"n": 1, "m": 0}, Drift.RESERIALISED),
        ({"n": 12345678901234567890}, {"n": 12345678901234567000}, Drift.RESERIALISED),
        ({"n": "5000"}, {"n": 5000}, Drift.RESERIALISED),
        ({"old": "a"}, {"replace_all": False, "old": "a"}, Drift.RESERIALISED),
        ({"content": "a  \nb\t\n"}, {"content": "a\nb\n"}, Drift.RESERIALISED),
        ({"command": "cd /workspace && ls"}, {"command": "ls"}, Drift.RESERIALISED),
        ({"command": "ls"}, {"command": "ls -l"}, Drift.EDITED),
        ({"flag": True}, {"flag": 1}, Drift.EDITED),
        ({"a": 1}, {}, Drift.EDITED),
        ({"n": "five"}, {"n": 5}, Drift.EDITED),
        ({"a": [1, 2]}, {"a": [1]}, Drift.EDITED),
    ],
)  # fmt: skip
def test_what_became_of_arguments_is_counted_and_changes_no_token(sampled: Any, echoed: Any, drift: Drift | None) -> None:
    async def script(talk: Talk) -> None:
        turn = await talk.ask(calls(("bash", sampled)))
        (made,) = turn.message.tool_calls
        talk.history += [Message("assistant", "", (ToolCall(made.id, made.name, echoed),)), *results(turn)]
        await talk.work(say("Done."))

    capture = play(script)
    assert branches(capture) == [("root", "policy", [0, 1])]
    assert [turn.drift for turn in capture.graph.turns] == [drift, None]
    assert capture.record("t-1").branches[0].drift == ({drift: 1} if drift else {})


def test_a_renamed_tool_is_the_same_turn_edited() -> None:
    """OpenCode repairs the case of a name and renames unknown tools; the id names the turn."""

    async def script(talk: Talk) -> None:
        turn = await talk.ask(call("Bash", n=1))
        (made,) = turn.message.tool_calls
        talk.history += [Message("assistant", "", (ToolCall(made.id, "bash", made.arguments),)), *results(turn)]
        await talk.work(say("Done."))

    capture = play(script)
    assert branches(capture) == [("root", "policy", [0, 1])]
    assert capture.graph.turns[0].drift is Drift.EDITED


def test_ids_are_minted_once_per_rollout_also_when_the_harness_starts_again() -> None:
    """Claude Code deletes a later call whose id it has seen before, and `--continue` reads the old ones back."""

    async def script(talk: Talk) -> None:
        await talk.work(calls(("bash", {}), ("read", {})))
        await talk.ask(call("read", n=1), [Message("system", "You look."), TASK], thread="a")
        again = Talk(talk.session, talk.engine, [*talk.history, Message("user", "Go on.")])
        await again.work(calls(("bash", {}), ("read", {})))

    capture = play(script)
    ids = [made.id for turn in capture.graph.turns for made in turn.message.tool_calls]
    assert len(set(ids)) == len(ids) == 5
    assert branches(capture) == [("root", "policy", [0, 2]), ("sub_agent", "sub_agent", [1])]


def test_a_branch_knows_the_oldest_and_the_newest_weights_behind_it() -> None:
    async def script(talk: Talk) -> None:
        for talk.engine.version in (3, 4):
            await talk.work(call("bash", n=1))
        talk.engine.version = 7
        await talk.ask(say("Seen."), [Message("system", "You look."), TASK], thread="a")

    record = play(script).record("t-1")
    assert [(branch.min_version, branch.max_version) for branch in record.branches] == [(3, 4), (7, 7)]
    assert [turn.policy_versions for turn in record.turns] == [[(0, 3)], [(0, 4)], [(0, 7)]]
