"""One model call as a dialect understood it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trainer.capture.message import Key, Message


@dataclass(frozen=True, slots=True)
class Request:
    """`tools` are in OpenAI's function form, as the renderer prints them. `max_tokens` is only an upper bound: sampling parameters come
    from the RunSpec. `thread` is the harness's own name of a sub-agent's conversation, empty on the main one. `unknown` are names of
    fields that mean nothing to the proxy.

    `call` identifies the request for retries: neither `stream` nor `max_tokens` is in it, because a client's fallback changes them.
    """

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]]
    model: str
    stream: bool = False
    usage_in_stream: bool = True
    max_tokens: int | None = None
    thread: str = ""
    unknown: frozenset[str] = frozenset()
    tools_key: Key = field(init=False)
    call: Key = field(init=False)

    def __post_init__(self) -> None:
        tools_key: Key = (json.dumps(self.tools, ensure_ascii=False),) if self.tools else ()
        object.__setattr__(self, "tools_key", tools_key)
        object.__setattr__(self, "call", (self.thread, tools_key, tuple(message.key for message in self.messages)))
