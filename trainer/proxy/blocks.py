"""A turn as blocks while it is being sampled: one state machine for all dialects.

What is shown early is always a prefix of what the parsed turn will say: text that could still change (half a character, white space at
an end, anything from the first tool call on) waits for `finish`. Tool calls are parsed once, on the whole text, and come last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from trainer.capture.message import Message, ToolCall
from trainer.engine.base import TokenIds
from trainer.proxy.rendering import Rendering

Kind = Literal["thinking", "text"]


@dataclass(frozen=True, slots=True)
class Open:
    """A block of text begins. At most one is open."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of the open block; empty when it only keeps the client waiting."""

    text: str


@dataclass(frozen=True, slots=True)
class Close:
    """The open block ends."""


@dataclass(frozen=True, slots=True)
class Call:
    """A whole tool call; no block is open."""

    call: ToolCall


Event = Open | Delta | Close | Call


class _State(Enum):
    START = auto()
    """Nothing but white space so far."""
    THINKING = auto()
    UNSURE = auto()
    """A tool call inside open reasoning: part of it if the reasoning is closed later, else its end."""
    TEXT = auto()
    HELD = auto()
    """What follows is said by `finish`."""


class Blocks:
    def __init__(self, rendering: Rendering, scaffold: TokenIds) -> None:
        self._marks, self._stops = rendering.marks, frozenset(rendering.stop_token_ids)
        reasoning = rendering.opens_reasoning(scaffold)
        self._expected: Kind = "thinking" if reasoning or rendering.thinking else "text"
        self._state = _State.THINKING if reasoning else _State.START
        if self._marks is None:
            self._state = _State.HELD
        self._ids: list[int] = []
        """Not yet decoded."""
        self._texts = {"thinking": _Text(rendering.decode), "text": _Text(rendering.decode)}
        self._open: Kind | None = None
        self._fed = False

    def feed(self, ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for token in ids:
            if token in self._stops:
                self._state = _State.HELD
            elif self._state is not _State.HELD:
                events += self._step(token)
            self._fed = True
        return events + self._show(final=False)

    def idle(self) -> list[Event]:
        """An empty delta of the open block; the block that is likely to come is opened when there is none."""
        return [*self._into(self._open or self._expected), Delta("")]

    def finish(self, message: Message) -> list[Event]:
        """The rest of the turn. Raises RuntimeError when it does not go on from what was shown."""
        self._ids.clear()
        events: list[Event] = []
        for kind, said in (("thinking", message.reasoning or ""), ("text", message.content)):
            shown = self._texts[kind].shown
            if not said.startswith(shown):
                raise RuntimeError(f"the {kind} shown while streaming is not what the turn says")
            if len(said) > len(shown):
                events += [*self._into("thinking" if kind == "thinking" else "text"), Delta(said[len(shown) :])]
        if self._open is not None:
            events.append(Close())
            self._open = None
        return events + [Call(call) for call in message.tool_calls]

    def _step(self, token: int) -> list[Event]:
        """Take one id. Events come only where one region ends; `_show` gives those of the region that goes on."""
        assert self._marks is not None  # noqa: S101 without marks the state is HELD
        marks, state = self._marks, self._state
        if token == marks.turn and not self._fed:  # a turn that begins with its own header
            self._state = _State.HELD
        elif state is _State.START and token == marks.think and not self._texts["text"].seen(self._ids):
            self._ids.clear()
            self._state = _State.THINKING
        elif state in (_State.THINKING, _State.UNSURE) and token == marks.end_think:
            self._state = _State.THINKING
            events = self._show(final=True)
            # The parser looks for the end of reasoning in the text, where an imitation of the token may stand.
            self._state = _State.HELD if "</think>" in self._texts["thinking"].shown else _State.TEXT
            return events
        elif state is _State.THINKING and token == marks.call:
            events = self._show(final=False)
            self._state = _State.UNSURE
            self._ids.append(token)
            return events
        elif state in (_State.START, _State.TEXT) and token == marks.call:
            self._state = _State.TEXT
            events = self._show(final=True)
            self._state = _State.HELD
            return events
        elif token != marks.think or state not in (_State.THINKING, _State.UNSURE):
            self._ids.append(token)
        return []

    def _show(self, *, final: bool) -> list[Event]:
        """`final`: the region ends here."""
        if self._state in (_State.UNSURE, _State.HELD):
            return []
        kind: Kind = "thinking" if self._state is _State.THINKING else "text"
        text = self._texts[kind].take(self._ids, final=final)
        if not text:
            return []
        if self._state is _State.START:
            self._state = _State.TEXT
        return [*self._into(kind), Delta(text)]

    def _into(self, kind: Kind) -> list[Event]:
        """Make `kind` the open block."""
        if self._open == kind:
            return []
        closing: list[Event] = [] if self._open is None else [Close()]
        self._open = kind
        return [*closing, Open(kind)]


class _Text:
    """Ids of one region to the text that can no longer change."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._space = ""
        self._retry_at = 0
        self.shown = ""

    def take(self, ids: list[int], *, final: bool) -> str:
        """Empties `ids` unless they end within a character. White space waits for what follows it."""
        if not ids or (len(ids) < self._retry_at and not final):
            return ""
        decoded = self._decode(ids)
        if decoded.endswith("\ufffd") and not final:
            self._retry_at = len(ids) + 1 + len(ids) // 8  # bytes that are no text must not cost quadratic time
            return ""
        ids.clear()
        self._retry_at = 0
        text = self._space + decoded if self.shown else decoded.lstrip()
        new = text.rstrip()
        self._space = text[len(new) :]
        self.shown += new
        return new

    def seen(self, ids: Sequence[int]) -> bool:
        """Whether `ids`, or what came before them, hold more than white space."""
        return bool(self.shown or self._decode(ids).strip())
