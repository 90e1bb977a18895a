"""Wire formats. A dialect only translates: body → `Request`, `Turn` → body or events, `Refusal` → status and body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from trainer.capture.graph import Turn
from trainer.capture.request import Request
from trainer.proxy.refusal import Refusal


class Dialect(Protocol):
    def parse(self, body: Any, headers: Mapping[str, str]) -> Request:
        """Raises Refusal(BAD_REQUEST) naming the field that is wrong."""
        ...

    def encode(self, turn: Turn, request: Request) -> dict[str, Any]: ...

    def events(self, turn: Turn, request: Request) -> Iterator[str]:
        """The turn as server-sent events."""
        ...

    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]: ...
