"""Recorded exchanges as they lie in a file: one JSON object per line (docs/capture.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CALLS = ("/chat/completions", "/messages", "/responses")
THREAD_HEADERS = ("x-claude-code-agent-id", "x-session-id", "x-litellm-session-id", "thread-id")


class BadRecording(Exception):
    """The file is no recording; the message says where and why."""


@dataclass(frozen=True)
class Block:
    """A piece of a sampled turn. `text` of a call is its raw argument text; `id` is the recorded call id, `item` the id of an item."""

    kind: str  # "thinking", "text" or "call"
    text: str
    name: str = ""
    id: str = ""
    item: str = ""


@dataclass(frozen=True)
class Exchange:
    """One HTTP exchange. Times are seconds."""

    i: int
    t: float
    t_end: float
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Any
    response: dict[str, Any]

    @property
    def model_call(self) -> bool:
        return self.method == "POST" and self.path.endswith(CALLS) and isinstance(self.body, dict)

    @property
    def hung_up(self) -> bool:
        """The harness closed the connection before the answer was complete."""
        return bool(self.response.get("client_gone"))

    @property
    def answered(self) -> bool:
        """The harness got a complete answer."""
        response = self.response
        broken = response.get("cut") or response.get("sse_error") or response.get("client_gone")
        return response.get("kind") in ("sse", "json") and 200 <= (response.get("status") or 0) < 300 and not broken

    @property
    def begun(self) -> bool:
        """Content had reached the harness when the answer broke off."""
        return any(_content(event.get("data")) for event in self.response.get("events") or [])

    @property
    def messages(self) -> list[Any]:
        found = self.body.get("messages") or self.body.get("input") or []
        return found if isinstance(found, list) else [found]

    @cached_property
    def history(self) -> list[str]:
        """The messages as comparable text."""
        return [json.dumps(_plain(message), sort_keys=True) for message in self.messages]

    @cached_property
    def conversation(self) -> str:
        """Equal for a request and its repetition, whatever `stream`, `max_tokens` or `model` say."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        thread = [headers.get(name) for name in THREAD_HEADERS]
        tools = [json.dumps(tool, sort_keys=True) for tool in self.body.get("tools") or []]
        return json.dumps([thread, tools, self.history])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for item in self.response.get("sampled") or [] for block in _blocks(item))

    @property
    def by_length(self) -> bool:
        """The turn ended because its tokens were used up."""
        tail = json.dumps([(self.response.get("events") or [])[-3:], self.response.get("body")])
        return any(
            mark in tail
            for mark in ('"max_tokens"', '"finish_reason": "length"', '"max_output_tokens"', '"model_context_window_exceeded"')
        )  # fmt: skip


def mention(id_: str) -> str:
    """A pattern for an id inside JSON text: whole, and when it is short, only as a value of its own."""
    if len(id_) < 6:
        return rf'(?<="){re.escape(id_)}(?="(?!\s*:))'
    return rf"(?<![\w-]){re.escape(id_)}(?![\w-])"


def is_turn(message: Any) -> bool:
    """The message, or the item, is what a model said."""
    if not isinstance(message, dict):
        return False
    return message.get("role") == "assistant" or message.get("type") in ("reasoning", "function_call", "custom_tool_call")


def load(path: Path) -> list[Exchange]:
    """Raises BadRecording."""
    try:
        lines = path.read_text("utf-8").split("\n")  # a JSON string may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecording(f"{path}: {error}") from None
    return [_exchange(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _exchange(line: str, where: str) -> Exchange:
    try:
        raw = json.loads(line)
        return Exchange(
            i=raw["i"],
            t=raw["t"],
            t_end=raw["t_end"] if raw.get("t_end") is not None else raw["t"],
            method=raw["method"],
            path=raw["path"],
            query=raw.get("query") or "",
            headers=raw.get("headers") or {},
            body=raw.get("request"),
            response=raw.get("response") or {},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadRecording(f"{where} is no recorded exchange: {type(error).__name__} {error}") from None


def _content(event: Any) -> bool:
    """Something of the turn: a block that opens, a delta that is not empty."""
    if not isinstance(event, dict):
        return False
    if event.get("type") == "content_block_start" or (str(event.get("type")).endswith(".delta") and event.get("delta")):
        return True
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
    return any(delta.get(name) for delta in deltas for name in ("content", "reasoning_content", "tool_calls"))


def _plain(value: Any) -> Any:
    """Without cache marks, and a single text block as its text: Claude Code moves both from call to call."""
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], dict) and value[0].get("type") == "text":
            return value[0].get("text")
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key != "cache_control"}
    return value


def _blocks(item: dict[str, Any]) -> Iterator[Block]:
    """The five forms of `sampled`: Anthropic blocks, a streamed chat turn, a chat message, and Responses items."""
    kind = item.get("type")
    if kind == "thinking":
        yield Block("thinking", item.get("thinking") or "")
    elif kind == "text":
        yield Block("text", item.get("text") or "")
    elif kind == "tool_use":
        yield Block("call", item.get("input_raw") or "", item.get("name") or "", item.get("id") or "")
    elif kind in ("chat", "msg"):
        yield from _chat(item)
    elif kind == "reasoning":
        parts = [*(item.get("summary") or []), *(item.get("content") or [])]
        yield Block("thinking", "\n".join(part.get("text") or "" for part in parts), item=item.get("id") or "")
    elif kind == "message":
        text = "".join(part.get("text") or "" for part in item.get("content") or [])
        yield Block("text", text, item=item.get("id") or "")
    elif kind == "function_call":
        name = item["name"] if not item.get("namespace") else f"{item['namespace']}__{item['name']}"
        yield Block("call", item.get("arguments") or "", name, item.get("call_id") or "", item.get("id") or "")
    elif kind == "custom_tool_call":
        text = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        yield Block("call", text, item.get("name") or "", item.get("call_id") or "", item.get("id") or "")


def _chat(item: dict[str, Any]) -> Iterator[Block]:
    reasoning = item.get("reasoning") or item.get("reasoning_content")
    if reasoning:
        yield Block("thinking", reasoning)
    if content := item.get("content"):
        yield Block("text", content)
    for call in item.get("tools") or item.get("tool_calls") or []:
        function = call.get("function") or call
        yield Block("call", function.get("arguments") or "", function.get("name") or "", call.get("id") or "")
