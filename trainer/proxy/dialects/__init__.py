"""Wire formats. A dialect only translates: body → `Request`, `Turn` → body or events, `Refusal` → status and body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainer.capture.graph import Turn
from trainer.capture.request import Request
from trainer.proxy.refusal import Refusal
from trainer.proxy.streaming import Writer


class Dialect(Protocol):
    def parse(self, body: Any, headers: Mapping[str, str]) -> Request:
        """Raises Refusal(BAD_REQUEST) naming the field that is wrong."""
        ...

    def encode(self, turn: Turn, request: Request, answer_id: str) -> dict[str, Any]:
        """`answer_id` is unique within the rollout: Claude Code takes two answers of one id for one."""
        ...

    def writer(self, request: Request, prompt_tokens: int, answer_id: str) -> Writer:
        """The same answer as server-sent events."""
        ...

    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        """Status and body in the words that make this dialect's harnesses do the right thing."""
        ...
