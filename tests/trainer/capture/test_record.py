from __future__ import annotations

import asyncio

from server.schemas.capture import BranchReason, CaptureRecord, Exclusion
from tests.trainer.scripted import ScriptedEngine, call, say
from trainer.capture.capture import Capture
from trainer.capture.message import Message
from trainer.capture.request import Request
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.vocabulary import byte_level

START = (Message("system", "You fix code."), Message("user", "Fix it."))
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


def capture(*, moe: bool, context: int = 4000) -> Capture:
    """A tool call, a malformed turn that was dropped, and an end."""
    tokenizer = byte_level()
    engine = ScriptedEngine(tokenizer, [call("bash", "I look.", command="ls"), say("oops"), say("Done.")], routes=moe, version=3)

    async def run() -> Capture:
        rendering = Rendering(tokenizer)
        session = Session("r-1", "key", engine, rendering, Sampling(1.0, 200, ()), Limits(max_turns=9, context=4000), harness="mini")
        first = await session.answer(Request(START, TOOLS, "m"))
        messages = (*START, first.message, Message("tool", "calc.py", tool_call_id=first.message.tool_calls[0].id))
        second = await session.answer(Request(messages, TOOLS, "m"))
        third = await session.answer(Request((*messages, Message("user", "Format error.")), TOOLS, "m"))
        first.sent = second.sent = third.sent = True
        return await session.close()

    made = asyncio.run(run())
    made.context = context
    return made


def test_record_tells_the_rollout() -> None:
    record = CaptureRecord.model_validate_json(capture(moe=True).record("t-1").model_dump_json())
    assert (record.trial_id, record.harness, record.violations) == ("t-1", "mini", [])
    first, second, third = record.turns
    assert first.context == [("system", "You fix code."), ("user", "Fix it.")]
    assert (first.text, first.tool_calls[0].name, first.tool_calls[0].arguments) == ("I look.", "bash", '{"command": "ls"}')
    assert second.context == [("tool", "calc.py")]
    assert third.context == [("tool", "calc.py"), ("user", "Format error.")]
    assert [turn.branch for turn in record.turns] == [0, 1, 0]
    assert [branch.reason for branch in record.branches] == [BranchReason.ROOT, BranchReason.MALFORMED_TURN]
    assert {turn.policy_version for turn in record.turns} == {3}
    assert record.sampled_tokens == sum(branch.sampled_tokens for branch in record.branches)
    times = [time for turn in record.turns for time in (turn.started, turn.finished)]
    assert None not in times and times == sorted(time for time in times if time is not None)


def test_branch_that_is_too_long_is_excluded_and_not_cut() -> None:
    """The shorter branch then trains the turn that both share."""
    whole = capture(moe=False).samples()
    lengths = sorted(len(sample.tokens) for sample in whole)
    cut = capture(moe=False, context=lengths[0])
    kept, dropped = cut.samples()
    assert (kept.excluded, len(kept.tokens)) == (None, lengths[0])
    assert (dropped.excluded, len(dropped.tokens)) == (Exclusion.OVER_BUDGET, lengths[1])
    assert int(kept.mask.sum()) + int(dropped.mask.sum()) == cut.sampled_tokens
    shared = cut.graph.turns[0]
    assert kept.mask[shared.start + shared.scaffold] and not dropped.mask[shared.start + shared.scaffold]
