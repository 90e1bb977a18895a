"""Random conversations against a session: whatever the harness does to its history, tokens stay what the engine saw."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from server.schemas.capture import Exclusion
from tests.trainer.audit import audit
from tests.trainer.scripted import ScriptedEngine, calls, say
from tests.trainer.tokenizer import make_tokenizer
from trainer.capture.graph import Turn
from trainer.capture.message import Message
from trainer.capture.request import Request
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.refusal import Refusal
from trainer.proxy.rendering import Rendered, Rendering, Tools
from trainer.proxy.session import Session

TOKENIZER = make_tokenizer()


class Watched(Rendering):
    """Remembers the new ids of the last prompt."""

    last: list[int]

    def render(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        rendered = super().render(messages, tools)
        self.last = rendered.ids
        return rendered

    def bridge(self, *args: Any) -> Rendered | None:
        rendered = super().bridge(*args)
        self.last = rendered.ids if rendered else []
        return rendered

    def splice(self, *args: Any) -> Rendered:
        rendered = super().splice(*args)
        self.last = rendered.ids
        return rendered


RENDERINGS = {thinking: Watched(TOKENIZER, thinking=thinking) for thinking in (False, True)}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("bash", "read")]
SAMPLED = [
    lambda n: calls(("bash", {"n": n})),
    lambda n: calls(("bash", {"n": n}), ("read", {"é": [n]}), text="Both."),
    lambda n: calls(("bash", {"n": n}), text=f"<think>\nhm {n}\n</think>\n\nLook."),
    lambda n: say(f"Text {n}."),
    lambda n: f"Ends otherwise {n}<|endoftext|>",
    lambda n: f"<tool_call>\nno json {n}\n</tool_call><|im_end|>",
    lambda n: f'<tool_call>\n{{"name": "bash", "arguments": {n}}}\n</tool_call>\n<tool_call>\n{{"na<|im_end|>',
    lambda n: f"<think>\nnever closed {n}<|im_end|>",
    lambda n: f"cut in the middle {n} " + "x" * 200,
    lambda n: f"<think>\ncut in thought {n} " + "x" * 200,
]
STEP = st.sampled_from(
    [
        "answer",
        "answer",
        "answer",
        "drop",
        "retry",
        "lost",
        "edit",
        "truncate",
        "tools",
        "compact",
        "agent",
        "cancel",
        "twins",
        "partial",
        "late",
    ]
)


class Harness:
    """A client without manners. `messages` is its history, to which it does what the steps say."""

    def __init__(self, session: Session, engine: ScriptedEngine, rendering: Watched, seed: int) -> None:
        self.session, self.engine, self.rendering = session, engine, rendering
        self.random = np.random.default_rng(seed)
        self.messages = [Message("system", "You fix code."), Message("user", "Fix it.")]
        self.tools, self.thread, self.count = TOOLS[:1], "", itertools.count()

    def request(self) -> Request:
        return Request(tuple(self.messages), self.tools, "m", thread=self.thread)

    async def ask(self) -> Turn:
        calls = len(self.engine.calls)
        turn = await self.session.answer(self.request())
        for call in self.engine.calls[calls:]:
            new = self.rendering.last
            assert call.prompt[-len(new) :] == new
        turn.sent = True
        return turn

    async def step(self, name: str) -> None:  # noqa: C901 (one case per bad habit)
        turn = await self.ask()
        match name:
            case "answer":
                self.take(turn)
            case "drop":
                self.messages.append(Message("user", f"Format error {next(self.count)}."))
            case "retry":
                again = await self.ask()
                self.take(turn if self.random.random() < 0.5 else again)
            case "late":  # first one tool result, then all of them
                self.take(turn)
                whole = self.messages
                self.messages = whole[: len(whole) - len(turn.message.tool_calls) + 1]
                await self.ask()
                self.messages = whole
            case "lost":
                turn.sent = False
                assert await self.ask() is turn
                self.take(turn)
            case "edit":
                self.take(turn)
                i = int(self.random.integers(len(self.messages)))
                old = self.messages[i]
                self.messages[i] = Message(old.role, f"cleared {next(self.count)}", old.tool_calls, old.tool_call_id)
            case "truncate":  # back to an earlier state
                del self.messages[2 + int(self.random.integers(len(self.messages) - 1)) :]
                self.messages.append(Message("user", f"Elsewhere {next(self.count)}."))
            case "tools":
                self.take(turn)
                self.tools = TOOLS if self.tools == TOOLS[:1] else TOOLS[:1]
            case "compact":
                self.messages = [Message("system", "You fix code."), Message("user", f"Summary {next(self.count)}.")]
            case "agent":
                self.take(turn)
                before, self.messages, self.thread = self.messages, [Message("user", "Sub task.")], f"a{next(self.count)}"
                self.take(await self.ask())
                await self.ask()
                self.messages, self.thread = before, ""
            case "cancel":
                self.messages.append(Message("user", f"Never mind {next(self.count)}."))
                call = asyncio.create_task(self.session.answer(self.request()))
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            case "twins":
                self.take(turn)
                one, two = await asyncio.gather(self.ask(), self.ask())
                assert one is two
            case "partial":
                message = turn.message
                self.messages += [Message("assistant", "", message.tool_calls[:1]), Message("user", "You were cut.")]

    def take(self, turn: Turn) -> None:
        self.messages.append(turn.message)
        results = [Message("tool", f"result {next(self.count)}", tool_call_id=call.id) for call in turn.message.tool_calls]
        self.random.shuffle(results)  # type: ignore[arg-type]
        self.messages += results or [Message("user", "Go on.")]


@settings(max_examples=150, phases=(Phase.explicit, Phase.generate))
@given(
    steps=st.lists(STEP, max_size=12),
    texts=st.lists(st.integers(0, len(SAMPLED) - 1), min_size=1, max_size=12),
    seed=st.integers(0, 2**16),
    thinking=st.booleans(),
    moe=st.booleans(),
)
def test_tokens_are_what_the_engine_saw(steps: list[str], texts: list[int], seed: int, thinking: bool, moe: bool) -> None:
    count = itertools.count()
    engine = ScriptedEngine(TOKENIZER, routes=moe, write=lambda: SAMPLED[texts[(n := next(count)) % len(texts)]](n))
    sampling = Sampling(1.0, 150, RENDERINGS[thinking].stop_token_ids)

    async def run() -> Session:
        session = Session("r-1", "key", engine, RENDERINGS[thinking], sampling, Limits(max_turns=60, context=4000), harness="test")
        harness = Harness(session, engine, RENDERINGS[thinking], seed)
        try:
            for name in steps:
                await harness.step(name)
                engine.version += 1
        except Refusal as refusal:
            assert refusal.reason in ("overflow", "turn_cap")
        await session.close()
        return session

    capture = asyncio.run(run()).capture
    audit(capture, engine)
    assert capture.proxy_error is capture.engine_error is None
    assert not capture.graph.turns or capture.branches()[0].reason == "root"
    for sample in capture.samples():
        assert sample.excluded in (None, Exclusion.UNDELIVERED)
    returned = {turn.index for turn in capture.graph.turns if turn.returned}
    trained = [turn for branch in capture.branches() if branch.excluded is None for turn in branch.owned]
    assert returned <= {turn.index for turn in trained}
    assert len({turn.call for turn in trained}) == len(trained)
