"""Short recordings of what the shipped ones do not show, written down as harness-wire's notes describe it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

TOOLS = ("bash", "read", "task")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str = "You fix code.") -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(*calls: tuple[str, str, str], text: str = "") -> dict[str, Any]:
    """Calls are (id, name, raw arguments)."""
    listed = [{"id": id_, "type": "function", "function": {"name": name, "arguments": raw}} for id_, name, raw in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": listed} if calls else {})}


def result(id_: str, text: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def chat(
    messages: list[dict[str, Any]],
    *calls: tuple[str, str, str],
    say: str = "",
    tools: tuple[str, ...] = TOOLS,
    label: str = "main",
    headers: dict[str, str] | None = None,
    request: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """A chat call that is answered with text and calls. `rest`: `t`, `t_end`, or `response` keys."""
    functions = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in tools]
    sampled = [{"type": "msg", **assistant(*calls, text=say)}]
    times = {key: rest.pop(key) for key in ("t", "t_end") if key in rest}
    return {
        "method": "POST",
        "path": "/v1/chat/completions",
        "label": label,
        "headers": {"Authorization": "Bearer dummy", **(headers or {})},
        "request": {"model": "m", "messages": messages, **({"tools": functions} if tools else {}), **(request or {})},
        "response": {"status": 200, "kind": "json", "sampled": sampled, **rest},
        **times,
    }


def claude(messages: list[dict[str, Any]], *sampled: dict[str, Any], path: str = "/v1/messages", **rest: Any) -> dict[str, Any]:
    """A streamed Anthropic call; `sampled` are blocks with `input_raw`."""
    times = {key: rest.pop(key) for key in ("t", "t_end") if key in rest}
    headers, tools = rest.pop("headers", {}), rest.pop("tools", TOOLS)
    listed = [{"name": name, "input_schema": {"type": "object"}} for name in tools]
    return {
        "method": "POST",
        "path": path,
        "label": rest.pop("label", "main"),
        "headers": {"x-api-key": "dummy", **headers},
        "request": {"model": "m", "max_tokens": 32000, "stream": True, "messages": messages, "tools": listed},
        "response": {"status": 200, "kind": "sse", "sampled": list(sampled), **rest},
        **times,
    }


def use(id_: str, name: str, raw: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input_raw": raw}


def used(id_: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def answer(id_: str, text: str = "ok") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id_, "content": text}]}


def write(folder: Path, *exchanges: dict[str, Any]) -> Path:
    """A recording; an exchange without times follows the one before it."""
    path, clock, lines = folder / "made" / "recording.jsonl", itertools.count(1.0), []
    path.parent.mkdir(exist_ok=True)
    for i, exchange in enumerate(exchanges, start=1):
        now = next(clock)
        lines.append(json.dumps({"i": i, "t": now, "t_end": now + 0.5, "conn": 1, "query": "", **exchange}))
    path.write_text("\n".join(lines))
    return path
