"""A harness without manners, over a real session: it edits, drops, retries, gives up, compacts, and talks to itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.trainer.capture.witness import Witness
from tests.trainer.scripted import calls, say
from trainer.capture.graph import Turn
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import Request
from trainer.engine.base import EngineUnavailable
from trainer.proxy.moulds import Rendered
from trainer.proxy.rendering import Rendering, Tools
from trainer.proxy.session import Session
from trainer.vocabulary import byte_level

TOKENIZER = byte_level()
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"Uses {name}.", "parameters": {}}} for name in ("bash", "read")
]
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
STEPS = [
    "answer", "answer", "answer", "drop", "retry", "lost", "edit", "truncate", "tools", "compact", "summary", "agents", "cancel", "twins",
    "partial", "late", "title", "interrupted",
]  # fmt: skip


class Watched(Rendering):
    """Remembers the new ids of the last prompt."""

    last: list[int] | None = None

    def render(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        rendered = super().render(messages, tools)
        self.last = rendered.ids
        return rendered

    def bridge(self, *args: Any) -> Rendered | None:
        rendered = super().bridge(*args)
        self.last = rendered.ids if rendered else None
        return rendered

    def splice(self, *args: Any) -> Rendered:
        rendered = super().splice(*args)
        self.last = rendered.ids
        return rendered


class Careless:
    """`messages` is its history, to which it does what the steps say. `disguise` stands in front of every text that the policy did not
    write, and makes it edit the arguments that it sends back."""

    def __init__(self, session: Session, witness: Witness, rendering: Watched, seed: int, disguise: str = "") -> None:
        self.session, self.witness, self.rendering, self.disguise = session, witness, rendering, disguise
        self.random = np.random.default_rng(seed)
        self.count = itertools.count()
        self.messages = [self.said("system", "You fix code."), self.said("user", "Fix it.")]
        self.tools, self.thread = TOOLS[:1], ""

    def said(self, role: Any, text: str, tool_call_id: str = "", calls: tuple[ToolCall, ...] = ()) -> Message:
        return Message(role, self.disguise + text, calls, tool_call_id)

    def request(self) -> Request:
        return Request(tuple(self.messages), self.tools, "m", thread=self.thread)

    async def ask(self, update: asyncio.Event | None = None) -> Turn:
        """`update`: the engine gets new weights as soon as it has streamed something, and then goes on."""
        self.rendering.last = None
        flight = self.session.board(self.request())
        new = self.rendering.last
        try:
            if update is not None:
                await flight.news(0)
                self.witness.new_weights()
                update.set()
            turn = await flight.turn()
        finally:
            self.session.leave(flight)
        if new is not None:  # not joined and not stored: what was rendered for this request is the end of its prompt
            prompt = np.concatenate([node.ids for node in turn.path()])[: turn.prompt_tokens]
            assert prompt[len(prompt) - len(new) :].tolist() == new
        turn.sent = True
        return turn

    async def step(self, name: str) -> None:  # noqa: C901 (one case per bad habit)
        if name == "interrupted":
            return await self.interrupted()
        turn = await self.ask()
        match name:
            case "answer":
                self.take(turn)
            case "drop":
                self.messages.append(self.said("user", f"Format error {next(self.count)}."))
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
                self.messages[i] = self.said(old.role, f"cleared {next(self.count)}", old.tool_call_id, old.tool_calls)
            case "truncate":  # back to an earlier state
                del self.messages[2 + int(self.random.integers(len(self.messages) - 1)) :]
                self.messages.append(self.said("user", f"Elsewhere {next(self.count)}."))
            case "tools":
                self.take(turn)
                self.tools = TOOLS if self.tools == TOOLS[:1] else TOOLS[:1]
            case "compact":
                self.messages = [self.messages[0], self.said("user", f"Summary {next(self.count)}.")]
            case "summary":  # asks for it in place, and puts it where the history was
                self.take(turn)
                self.messages.append(self.said("user", "Summarise all of it."))
                summary = await self.ask()
                self.messages = [self.messages[0], self.said("user", f"So far: {summary.message.content}")]
            case "agents":  # two at once, and the parent does not wait
                self.take(turn)
                await asyncio.gather(self.agent("a"), self.agent("b"), self.ask())
            case "cancel":
                self.messages.append(self.said("user", f"Never mind {next(self.count)}."))
                await self.gives_up()
            case "twins":
                self.take(turn)
                one, two = await asyncio.gather(self.ask(), self.ask())
                assert one is two
            case "partial":
                self.messages += [self.said("assistant", "I", calls=turn.message.tool_calls[:1]), self.said("user", "You were cut.")]
            case "title":
                self.take(turn)
                before, tools, self.tools = self.messages, self.tools, []
                self.messages = [self.said("system", "Name this."), self.said("user", "Fix it.")]
                await self.ask()
                self.messages, self.tools = before, tools

    async def agent(self, name: str) -> None:
        """A conversation of its own beside this one."""
        other = Careless(self.session, self.witness, self.rendering, next(self.count), self.disguise)
        other.thread = f"{name}{next(self.count)}"
        other.messages = [self.said("user", f"Sub task {name}.")]
        for _ in range(int(self.random.integers(1, 4))):
            other.take(await other.ask())

    async def gives_up(self) -> None:
        flight = self.session.board(self.request())
        for _ in range(int(self.random.integers(4))):
            await asyncio.sleep(0)
        self.session.leave(flight)
        with contextlib.suppress(Exception):  # whatever it came to, nobody is there to hear it
            await flight.turn()

    async def interrupted(self) -> None:
        """The engine is lost in mid-turn and comes back with new weights; the turn goes on behind what was sampled."""
        update = asyncio.Event()
        self.witness.engine.script = [[f"Half {next(self.count)} ", update, EngineUnavailable("lost")], say("and the rest.")]
        try:
            self.take(await self.ask(update))
        finally:
            self.witness.engine.script = []

    def take(self, turn: Turn) -> None:
        message = turn.message
        if self.disguise and message.tool_calls:
            edited = tuple(ToolCall(call.id, call.name, {"edited": self.disguise}) for call in message.tool_calls)
            message = self.said("assistant", message.content, calls=edited)
        self.messages.append(message)
        results = [self.said("tool", f"result {next(self.count)}", call.id) for call in turn.message.tool_calls]
        self.random.shuffle(results)  # type: ignore[arg-type]
        self.messages += results or [self.said("user", "Go on.")]
