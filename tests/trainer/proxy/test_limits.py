"""What ends a rollout, in words that end its harness, and nothing of it in the policy's mouth."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.trainer.audit import audit
from tests.trainer.proxy.conftest import Rollout
from tests.trainer.scripted import call, say
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello."}]


async def go_on(rollout: Rollout, turns: int) -> None:
    """A harness that says "Go on." after every answer, and "ok" to every tool call."""
    messages = list(HELLO)
    for _ in range(turns):
        answer = await rollout.openai.chat.completions.create(model="m", messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if message.tool_calls:
            messages += [{"role": "tool", "tool_call_id": one.id, "content": "ok"} for one in message.tool_calls]
        else:
            messages.append({"role": "user", "content": "Go on."})


async def refused(rollout: Rollout, turns: int) -> None:
    """`turns` answers are given, the next one is refused as too long; only the policy's own tokens are in the mask."""
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await go_on(rollout, turns + 1)
    assert len(rollout.engine.calls) == turns
    audit(rollout.proxy._sessions["r-1"].capture, rollout.engine)


@pytest.mark.parametrize("limits", [Limits(2, 20_000)])
async def test_turn_cap(rollout: Rollout, limits: Limits) -> None:
    rollout.engine.script = [say("One."), say("Two.")]
    await refused(rollout, limits.max_turns)
    capture = await rollout.close()
    assert capture.turn_cap_hit and not capture.over_length


@pytest.mark.parametrize("limits", [Limits(20, 20_000, idle_turns=2)])
async def test_no_tool_call_cap_counts_turns_in_a_row(rollout: Rollout, limits: Limits) -> None:
    rollout.engine.script = [say("One."), call("bash", command="ls"), say("Two."), say("Three.")]
    await refused(rollout, 4)
    assert (await rollout.close()).turn_cap_hit


@pytest.mark.parametrize("limits", [Limits(20, 20_000)])
async def test_no_tool_call_cap_is_off_by_default(rollout: Rollout, limits: Limits) -> None:
    rollout.engine.script = [say(str(i)) for i in range(9)]
    await go_on(rollout, 9)


@pytest.mark.parametrize("limits", [Limits(20, 20_000, budget=150)])
async def test_token_budget_clamps_and_then_ends(rollout: Rollout, limits: Limits) -> None:
    rollout.engine.script = [say("word " * 20), say("word " * 200), say("never")]
    await refused(rollout, 2)
    capture = await rollout.close()
    assert capture.sampled_tokens == limits.budget and capture.over_length and not capture.turn_cap_hit
    assert [turn.stop for turn in capture.graph.turns] == ["stop", "length"]


@pytest.mark.parametrize("limits", [Limits(20, 20_000, budget=150)])
@pytest.mark.parametrize(("most", "cut"), [(5_000, True), (30, False)])
async def test_an_answer_that_the_budget_cuts_off_may_be_the_last(rollout: Rollout, most: int, cut: bool) -> None:
    """Codex ends there, without another call that could be refused. What the client itself asked for is no budget of ours."""
    rollout.engine.script = [say("word " * 200)]
    answer = await rollout.anthropic.messages.create(model="m", max_tokens=most, messages=HELLO)
    assert answer.stop_reason == "max_tokens"
    assert (await rollout.close()).over_length is cut


@pytest.mark.parametrize("limits", [Limits(20, 20_000, prompt=8)])
async def test_prompt_budget_counts_on_the_first_prompt(rollout: Rollout, limits: Limits) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8 maximum"):
        await rollout.anthropic.messages.create(model="m", max_tokens=5, messages=HELLO)
    assert (await rollout.close()).over_length


TOOL: Any = {"name": "bash", "input_schema": {"type": "object"}}
LONG: Any = [{"role": "user", "content": "word " * 900}]


@pytest.mark.parametrize("limits", [Limits(20, 20_000, prompt=700)])
@pytest.mark.parametrize(
    ("before", "tools", "fits"),
    [([], [TOOL], False), ([[]], [TOOL], False), ([[TOOL]], [TOOL], True), ([[TOOL]], [], True), ([], [], False), ([[]], [], True)],
    ids=["opens", "behind a title", "goes on behind a summary", "asks for a summary", "opens without tools", "goes on without tools"],
)
async def test_only_the_call_that_opens_a_rollout_has_a_prompt_budget(
    rollout: Rollout, limits: Limits, before: list[list[Any]], tools: list[Any], fits: bool
) -> None:
    """A compaction reads the history that has grown, and hands over a long summary."""
    rollout.engine.script = [say("One."), say("Two.")]
    for given in before:
        await rollout.anthropic.messages.create(model="m", max_tokens=5, messages=HELLO, tools=given)
    if fits:
        await rollout.anthropic.messages.create(model="m", max_tokens=5, messages=LONG, tools=tools)
    else:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 700 maximum"):
            await rollout.anthropic.messages.create(model="m", max_tokens=5, messages=LONG, tools=tools)


@pytest.mark.parametrize("limits", [Limits(20, 20_000, prompt=60, response=40)])
async def test_response_budget_counts_what_came_behind_the_first_prompt(rollout: Rollout, limits: Limits) -> None:
    rollout.engine.script = [say("One."), say("word " * 200)]
    await refused(rollout, 2)
    capture = await rollout.close()
    first, second = capture.graph.turns
    assert second.stop == "length" and second.end == first.prompt_tokens + 40


@pytest.mark.parametrize("limits", [Limits(20, 120)])
async def test_output_is_clamped_to_the_room_left(rollout: Rollout, limits: Limits) -> None:
    """20: Claude Code asks for 32,000 tokens, whatever the context is."""
    rollout.engine.script = [say("word " * 300)]
    async with rollout.anthropic.messages.stream(model="m", max_tokens=32_000, messages=HELLO) as stream:
        answer = await stream.get_final_message()
    call = rollout.engine.calls[0]
    assert answer.stop_reason == "max_tokens" and len(call.prompt) + len(call.sampled) == 120
    text = "".join(block.text for block in answer.content if block.type == "text")
    back: Any = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 120 maximum"):
        await rollout.anthropic.messages.create(model="m", max_tokens=100, messages=back)


async def test_unknown_foreign_and_missing_keys_look_the_same(rollout: Rollout) -> None:
    """Nobody learns from an answer whether a rollout exists, is open, or was closed."""
    await rollout.proxy.open("r-2", "other-key", Sampling(1.0, 5, ()), Limits(2, 100), "test")
    await rollout.proxy.open("r-3", "third-key", Sampling(1.0, 5, ()), Limits(2, 100), "test")
    await rollout.proxy.close("r-3")
    base, seen = rollout.url.removesuffix("r-1"), set()
    for path in ("messages", "chat/completions", "responses", "messages/count_tokens"):
        for rollout_id in ("r-1", "r-2", "r-3", "never", "%2e%2e", "x" * 500):
            for key in ("", "wrong", "é", rollout.key if rollout_id != "r-1" else "other-key"):
                given = {b"x-api-key": key.encode()} if key else {}
                answer = await rollout.http.post(f"{base}{rollout_id}/v1/{path}", content=b"{}", headers=given)
                headers = tuple(sorted((name, value) for name, value in answer.headers.items() if name != "date"))
                seen.add((path.startswith("messages"), answer.status_code, answer.text, headers))
    assert len(seen) == 2 and {status for _, status, _, _ in seen} == {401}  # one in each family's words
    assert rollout.engine.started == 0


@pytest.mark.parametrize("limits", [Limits(20, 100)])
async def test_a_client_that_only_asks_too_much_is_ended(rollout: Rollout, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks is kept until the end, so there is an end to it."""
    monkeypatch.setattr("trainer.proxy.session.MAX_UNANSWERED", 5)
    rollout.engine.script = [say("One.")]
    long: Any = [{"role": "user", "content": "word " * 100}]
    for messages in [long] * 4 + [HELLO] + [long] * 5:
        answer = await rollout.http.post(
            f"{rollout.url}/v1/chat/completions", json={"messages": messages}, headers={"x-api-key": rollout.key}
        )
        assert answer.status_code == (200 if messages is HELLO else 400)
    with pytest.raises(openai.NotFoundError, match="5 calls in a row"):
        await rollout.openai.chat.completions.create(model="m", messages=HELLO)
    assert (await rollout.close()).over_length


@pytest.mark.parametrize("limits", [Limits(1, 20_000)])
async def test_a_call_past_the_cap_proves_the_last_answer(rollout: Rollout, limits: Limits) -> None:
    rollout.engine.script = [call("bash", command="ls")]
    await refused(rollout, 1)
    capture = await rollout.close()
    assert capture.graph.turns[0].returned and sum(1 for _ in capture.graph.nodes()) == 3  # nothing of what was refused is kept
