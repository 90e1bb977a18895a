"""The answer side of Anthropic messages: a turn as one message, and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from trainer.capture.graph import Turn
from trainer.capture.message import ToolCall
from trainer.capture.request import Request
from trainer.proxy.blocks import Blocks, Call, Close, Delta, Event, Kind, Open
from trainer.proxy.dialects.fields import sse


def answer(turn: Turn, request: Request, answer_id: str) -> dict[str, Any]:
    usage = _usage(turn.prompt_tokens, len(turn.sampled))
    return {**_head(request, answer_id), "content": _blocks(turn), "stop_reason": _stop(turn), "usage": usage}


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    message, blocks = turn.message, list[dict[str, Any]]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [_tool_use(call) for call in message.tool_calls]


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _stop(turn: Turn) -> str:
    """A whole call is to be run, also when the tokens ran out behind it."""
    if turn.message.tool_calls:
        return "tool_use"
    return "max_tokens" if turn.stop == "length" else "end_turn"


def _head(request: Request, answer_id: str) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": request.model, "stop_sequence": None}


def _usage(prompt_tokens: int, sampled: int) -> dict[str, int]:
    return {"input_tokens": prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": sampled}


class AnthropicEvents:
    def __init__(self, request: Request, prompt_tokens: int, answer_id: str) -> None:
        self._head = {**_head(request, answer_id), "content": [], "stop_reason": None, "usage": _usage(prompt_tokens, 0)}
        self._index = -1
        self._kind: Kind = "text"

    def start(self) -> str:
        return _event("message_start", message=self._head)

    def write(self, events: Iterable[Event]) -> str:
        return "".join(self._one(event) for event in events)

    def keep_alive(self, blocks: Blocks) -> str:
        """Claude Code gives up after 300 s without a real event; pings and comments are none for it."""
        return self.write(blocks.idle())

    def end(self, turn: Turn) -> str:
        delta = {"stop_reason": _stop(turn), "stop_sequence": None}
        return _event("message_delta", delta=delta, usage={"output_tokens": len(turn.sampled)}) + _event("message_stop")

    def break_off(self, error: dict[str, Any]) -> str:
        return sse(error, "error")

    def _one(self, event: Event) -> str:
        match event:
            case Open(kind):
                self._kind = kind
                empty = {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}
                return self._begin(empty)
            case Delta(text):
                delta = {"type": "text_delta", "text": text} if self._kind == "text" else {"type": "thinking_delta", "thinking": text}
                return self._delta(delta)
            case Close():
                return (self._delta({"type": "signature_delta", "signature": ""}) if self._kind == "thinking" else "") + self._ended()
            case Call(call):
                begin = self._begin({**_tool_use(call), "input": {}})
                return begin + self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments)}) + self._ended()

    def _begin(self, block: dict[str, Any]) -> str:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _ended(self) -> str:
        return _event("content_block_stop", index=self._index)


def _event(name: str, **fields: Any) -> str:
    return sse({"type": name, **fields}, name)
