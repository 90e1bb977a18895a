"""One model call as a dialect understood it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.capture.message import Key, Message

KindHint = Literal["", "summary", "auxiliary"]


@dataclass(frozen=True, slots=True)
class Request:
    """`tools` are in OpenAI's function form, as the renderer prints them. `max_tokens` is only an upper bound: sampling parameters come
    from the RunSpec. `thread` is the harness's own name of a sub-agent's conversation, empty on the main one. `unknown` are names of
    fields that mean nothing to the proxy. `parent_thread` and `kind_hint` are what the harness itself says about a call: the thread that
    spawned this one, and that it is no turn of a conversation. `origins` maps tool names to how the client's wire format names them.

    `call` identifies the request for retries by thread, tools and messages. Neither `stream` nor `max_tokens` is in it, because a
    client's fallback changes them.
    """

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]]
    model: str
    stream: bool = False
    usage_in_stream: bool = True
    max_tokens: int | None = None
    thread: str = ""
    unknown: frozenset[str] = frozenset()
    parent_thread: str = ""
    kind_hint: KindHint = ""
    origins: Mapping[str, Any] = field(default_factory=dict)
    tools_key: bytes = field(init=False)
    """Digest of the tools, empty when there are none."""
    call: bytes = field(init=False)

    def __post_init__(self) -> None:
        tools_key = _digest((json.dumps(self.tools),)) if self.tools else b""
        object.__setattr__(self, "tools_key", tools_key)
        object.__setattr__(self, "call", _digest((self.thread, tools_key.hex(), *(message.key for message in self.messages))))


def _digest(key: Key) -> bytes:
    """Of nested tuples of strings. A digest, because a turn keeps it, and must not keep the whole history of its request alive."""
    digest = hashlib.blake2b(digest_size=16)

    def add(part: Key | str) -> None:
        if isinstance(part, str):
            raw = part.encode("utf-8", "surrogatepass")
            digest.update(b"s%d:" % len(raw))
            digest.update(raw)
        else:
            digest.update(b"t%d:" % len(part))
            for item in part:
                add(item)

    add(key)
    return digest.digest()
