"""Messages in the one form that the graph compares and the renderer reads. Dialects translate into it and out of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON value, or the raw text when the client re-sent something that is no JSON."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Message:
    """`key` is what two messages are compared by, on which the path search of the graph rests.

    System, user and tool messages compare exactly. An assistant message is named by the complete ordered list of its tool-call ids:
    harnesses re-serialise and edit arguments, move text and repair names, but every one of them returns the ids as they were minted.
    A text-only turn has no id in chat APIs and compares by its words, because harnesses trim and re-flow white space.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str | None = None
    key: Key = field(init=False)
    digest: bytes = field(init=False)
    """Of the key."""
    size: int = field(init=False, compare=False)
    """Characters, those of the arguments as JSON included."""

    def __post_init__(self) -> None:
        key: Key
        if self.role != "assistant":
            key = (self.role, self.tool_call_id, self.content)
        elif self.tool_calls:
            key = ("calls", *(call.id for call in self.tool_calls))
        else:
            key = ("text", " ".join(self.content.split()))
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "digest", digest(key))
        object.__setattr__(self, "size", sum(map(len, self.texts())))

    def texts(self) -> list[str]:
        """Whatever a template may print of it."""
        calls = [text for call in self.tool_calls for text in (call.name, json.dumps(call.arguments))]
        return [self.content, self.reasoning or "", *calls]

    def wire(self) -> dict[str, Any]:
        """The message as `renderers` reads it (OpenAI chat form, arguments as values)."""
        body: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            body["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            body["tool_call_id"] = self.tool_call_id
        if self.reasoning is not None:
            body["reasoning_content"] = self.reasoning
        return body


def digest(key: Key) -> bytes:
    """Of nested tuples of strings and bytes. What keeps it must not keep the whole history of its request alive."""
    return hashlib.blake2b(b"".join(_framed(key)), digest_size=16).digest()


def _framed(key: Key) -> list[bytes]:
    parts = [b"t%d:" % len(key)]
    for part in key:
        if isinstance(part, tuple):
            parts += _framed(part)
        else:
            raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            parts += (b"s%d:" % len(raw), raw)
    return parts
