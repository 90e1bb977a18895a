"""One model call as a dialect understood it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from trainer.capture.message import Message, digest

KindHint = Literal["", "summary", "auxiliary"]


class Tools(list[dict[str, Any]]):
    """Tools of a request, as a list that knows its own digest. Nobody may change it."""

    @cached_property
    def text(self) -> str:
        return json.dumps(self)

    @cached_property
    def key(self) -> bytes:
        return digest((self.text,)) if self else b""


@dataclass(frozen=True, slots=True)
class Request:
    """`tools` are in OpenAI's function form, as the renderer prints them. `max_tokens` is only an upper bound: sampling parameters come
    from the RunSpec. `thread` is the harness's own name of a sub-agent's conversation, empty on the main one. `unknown` are names of
    fields that mean nothing to the proxy. `kind_hint` is what the harness itself says about a call that is no turn of a
    conversation. `origins` maps tool names to how the client's wire format names them.

    `call` identifies the request for retries by thread, tools and messages. Neither `stream` nor `max_tokens` is in it, because a
    client's fallback changes them.
    """

    messages: tuple[Message, ...]
    tools: Tools | list[dict[str, Any]]
    model: str
    stream: bool = False
    usage_in_stream: bool = True
    max_tokens: int | None = None
    thread: str = ""
    unknown: frozenset[str] = frozenset()
    kind_hint: KindHint = ""
    origins: Mapping[str, Any] = field(default_factory=dict)
    tools_key: bytes = field(init=False)
    """Digest of the tools, empty when there are none."""
    call: bytes = field(init=False)

    def __post_init__(self) -> None:
        tools = self.tools if isinstance(self.tools, Tools) else Tools(self.tools)
        object.__setattr__(self, "tools", tools)
        object.__setattr__(self, "tools_key", tools.key)
        object.__setattr__(self, "call", digest((self.thread, tools.key, b"".join(message.digest for message in self.messages))))
