"""The output side of OpenAI responses: items of a turn and the response object around them."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any

from trainer.capture.graph import Turn
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import Request
from trainer.proxy.blocks import Kind


@dataclass(frozen=True, slots=True)
class Origin:
    """How the client names a tool that the policy knows as a function. `kind` is the item type of its calls."""

    kind: str
    namespace: str
    name: str


def response(request: Request, answer_id: str, items: list[dict[str, Any]], turn: Turn | None) -> dict[str, Any]:
    """The response object; without a turn it is still in progress. Codex ends at an incomplete one, and would not run its calls."""
    cut = turn is not None and turn.stop == "length" and not turn.message.tool_calls
    status = "in_progress" if turn is None else "incomplete" if cut else "completed"
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": request.model,
        "output": items,
        "usage": _usage(turn) if turn else None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
    }


def output(message: Message, request: Request, answer_id: str) -> list[dict[str, Any]]:
    """The finished items of a turn, numbered in order."""
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(reasoning(answer_id, len(items), message.reasoning))
    if message.content:
        items.append(text(answer_id, len(items), message.content))
    for call in message.tool_calls:
        items.append(tool_call(answer_id, len(items), call, request))
    return items


def item_id(kind: Kind, answer_id: str, index: int) -> str:
    return f"{'msg' if kind == 'text' else 'rs'}_{answer_id}_{index}"


def answer_of(item_id: Any) -> str:
    """The answer that an item of the proxy's is from, "" when its id says nothing of the kind."""
    found = re.fullmatch(r"(?:msg|rs|fc|ctc)_([0-9a-f]{16})_\d+", item_id) if isinstance(item_id, str) else None
    return found[1] if found else ""


def reasoning(answer_id: str, index: int, words: str) -> dict[str, Any]:
    """As a summary, because that is the part that Codex sends back."""
    summary = [{"type": "summary_text", "text": words}]
    return {"type": "reasoning", "id": item_id("thinking", answer_id, index), "summary": summary, "encrypted_content": None}


def text(answer_id: str, index: int, words: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": words, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": item_id("text", answer_id, index), "role": "assistant", "status": "completed", "content": content}


def tool_call(answer_id: str, index: int, call: ToolCall, request: Request) -> dict[str, Any]:
    origin: Origin = request.origins.get(call.name) or Origin("function_call", "", call.name)
    custom = origin.kind == "custom_tool_call"
    item = {
        "type": origin.kind,
        "id": f"{'ctc' if custom else 'fc'}_{answer_id}_{index}",
        "call_id": call.id,
        "name": origin.name,
        "input" if custom else "arguments": _input(call.arguments) if custom else json.dumps(call.arguments),
        "status": "completed",
    }
    return {**item, "namespace": origin.namespace} if origin.namespace else item


def _input(arguments: Any) -> str:
    """The text of a custom tool's call; what is not in the declared form is given as it is."""
    if isinstance(arguments, dict) and isinstance(arguments.get("input"), str):
        return str(arguments["input"])
    return json.dumps(arguments)


def _usage(turn: Turn) -> dict[str, Any]:
    sampled = len(turn.sampled)
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_tokens + sampled,
    }
