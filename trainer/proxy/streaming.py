"""An answer as server-sent events, written while the policy samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trainer.capture.graph import Turn
from trainer.engine.base import TokenIds
from trainer.proxy.blocks import Blocks, Event
from trainer.proxy.rendering import Rendering


class Writer(Protocol):
    """A dialect's server-sent events of one answer."""

    def start(self) -> str: ...

    def write(self, events: Iterable[Event]) -> str: ...

    def keep_alive(self, blocks: Blocks) -> str:
        """What this dialect's clients take as a sign of life."""
        ...

    def end(self, turn: Turn) -> str: ...

    def break_off(self, error: dict[str, Any]) -> str: ...


class TurnStream:
    """The server-sent events of one answer, as text to be written out: `start`, any number of `feed` and `keep_alive`, `finish`.

    A turn that was sampled before is streamed by `start` and `finish` alone.
    """

    def __init__(self, rendering: Rendering, scaffold: TokenIds, writer: Writer) -> None:
        """`scaffold` is the generation prompt, which may open the reasoning."""
        self._blocks, self._writer = Blocks(rendering, scaffold), writer
        self._head = writer.start()  # numbered before what follows, which is made first

    def start(self) -> str:
        return self._head

    def feed(self, ids: Sequence[int]) -> str:
        """Newly sampled ids; returns "" when they show nothing yet."""
        return self._writer.write(self._blocks.feed(ids))

    def keep_alive(self) -> str:
        return self._writer.keep_alive(self._blocks)

    def finish(self, turn: Turn) -> str:
        return self._writer.write(self._blocks.finish(turn.message)) + self._writer.end(turn)

    def break_off(self, error: dict[str, Any]) -> str:
        """The last event of an answer that cannot be ended; `error` is the body of the dialect's refusal."""
        return self._writer.break_off(error)
