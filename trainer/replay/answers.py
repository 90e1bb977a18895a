"""Answers as a client reads them. Every event and body must hold for the official SDKs' own types, and every stream for its grammar."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

FINISH = {"end_turn": "stop", "tool_use": "calls", "max_tokens": "length", "stop": "stop", "tool_calls": "calls", "length": "length"}


class BadAnswer(Exception):
    """No client could read this; the message says why."""


@dataclass
class Answer:
    """What a harness makes of an answer. `items` are (kind, id) of Responses items in order."""

    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """(id, name, arguments as text)."""
    items: list[tuple[str, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    finish: str = ""
    """`stop`, `calls` or `length`; Responses do not tell the first two apart."""


def read(path: str, body: bytes, *, stream: bool) -> Answer:
    """Raises BadAnswer."""
    dialect = "anthropic" if path.endswith("/messages") else "responses" if path.endswith("/responses") else "chat"
    try:
        if not stream:
            whole = json.loads(body)
            _types(dialect)[1](whole)
            return {"anthropic": _message, "responses": _response, "chat": _completion}[dialect](whole)
        events = _events(body)
        for event in events:
            _types(dialect)[0](event)
        return {"anthropic": _anthropic, "responses": _responses, "chat": _chat}[dialect](events)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, ValidationError) as error:
        raise BadAnswer(f"{type(error).__name__}: {str(error)[:300]}") from None


def _events(body: bytes) -> list[Any]:
    events = []
    for part in body.decode().split("\n\n"):
        data = "\n".join(line[5:].strip() for line in part.split("\n") if line.startswith("data:"))
        if data and data != "[DONE]":
            events.append(json.loads(data))
    return events


def _message(body: dict[str, Any]) -> Answer:
    answer = Answer(prompt_tokens=body["usage"]["input_tokens"], finish=FINISH[body["stop_reason"]])
    for block in body["content"]:
        if block["type"] == "text":
            answer.text += block["text"]
        elif block["type"] == "tool_use":
            answer.calls.append((block["id"], block["name"], json.dumps(block["input"])))
    return answer


def _anthropic(events: list[Any]) -> Answer:
    """Blocks open and close in order, and only the open one grows."""
    if events[0]["type"] != "message_start" or events[-1]["type"] != "message_stop":
        raise BadAnswer("a stream must begin with message_start and end with message_stop")
    answer, index, arguments = Answer(prompt_tokens=events[0]["message"]["usage"]["input_tokens"]), 0, ""
    block: Any = None
    grows = {"text": ("text_delta",), "thinking": ("thinking_delta", "signature_delta"), "tool_use": ("input_json_delta",)}
    for event in events[1:]:
        kind = event["type"]
        if kind in ("content_block_start", "content_block_delta", "content_block_stop") and event["index"] != index:
            raise BadAnswer(f"{kind} of block {event['index']} while block {index} is due")
        if (kind == "content_block_start") == (block is not None) and kind.startswith("content_block"):
            raise BadAnswer(f"{kind} while {'a' if block else 'no'} block is open")
        if kind == "content_block_start":
            block, arguments = event["content_block"], ""
        elif kind == "content_block_delta":
            if event["delta"]["type"] not in grows[block["type"]]:
                raise BadAnswer(f"{event['delta']['type']} inside a {block['type']} block")
            answer.text += event["delta"].get("text", "")
            arguments += event["delta"].get("partial_json", "")
        elif kind == "content_block_stop":
            if block["type"] == "tool_use":
                answer.calls.append((block["id"], block["name"], arguments))
            block, index = None, index + 1
        elif kind == "message_delta":
            answer.finish = FINISH[event["delta"]["stop_reason"]]
    return answer


def _completion(body: dict[str, Any]) -> Answer:
    message = body["choices"][0]["message"]
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    finish = FINISH[body["choices"][0]["finish_reason"]]
    return Answer(message.get("content") or "", calls, prompt_tokens=body["usage"]["prompt_tokens"], finish=finish)


def _chat(events: list[Any]) -> Answer:
    answer, calls, finish = Answer(), dict[int, list[str]](), None
    for event in events:
        answer.prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", answer.prompt_tokens)
        for choice in event["choices"]:
            if finish is not None:
                raise BadAnswer("a choice after finish_reason")
            finish = choice["finish_reason"]
            answer.text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or []:
                call = calls.setdefault(part["index"], [part.get("id") or "", "", ""])
                call[1] += part["function"].get("name") or ""
                call[2] += part["function"].get("arguments") or ""
    if finish is None or sorted(calls) != list(range(len(calls))):
        raise BadAnswer(f"finish_reason {finish}, tool calls {sorted(calls)}")
    answer.calls = [(call[0], call[1], call[2]) for _, call in sorted(calls.items())]
    answer.finish = FINISH[finish]
    return answer


def _response(body: dict[str, Any]) -> Answer:
    answer = Answer(prompt_tokens=body["usage"]["input_tokens"], finish="length" if body["status"] == "incomplete" else "")
    for item in body["output"]:
        answer.items.append((item["type"], item.get("id") or ""))
        if item["type"] == "message":
            answer.text += "".join(part.get("text", "") for part in item["content"])
        elif item["type"] == "function_call":
            name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
            answer.calls.append((item["call_id"], name, item["arguments"]))
        elif item["type"] == "custom_tool_call":
            answer.calls.append((item["call_id"], item["name"], json.dumps({"input": item["input"]}, ensure_ascii=False)))
    return answer


def _responses(events: list[Any]) -> Answer:
    """The last event repeats every item that was closed before it."""
    last = events[-1]
    if last["type"] not in ("response.completed", "response.incomplete"):
        raise BadAnswer(f"a stream ends with {last['type']}")
    closed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    opened = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    if closed != last["response"]["output"] or opened != [item["id"] for item in closed]:
        raise BadAnswer("items that were opened, closed and listed at the end differ")
    return _response(last["response"])


Check = Callable[[Any], Any]


@cache
def _types(dialect: str) -> tuple[Check, Check]:
    """Checks of an event and of a body by the SDK's types. The openai package is a development dependency: without it, only the grammar
    is checked."""
    if dialect == "anthropic":
        from anthropic.types import Message, RawMessageStreamEvent

        return TypeAdapter(RawMessageStreamEvent).validate_python, Message.model_validate
    if importlib.util.find_spec("openai") is None:
        return (lambda event: event), (lambda body: body)
    if dialect == "chat":
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        return ChatCompletionChunk.model_validate, ChatCompletion.model_validate
    from openai.types.responses import Response, ResponseStreamEvent

    return TypeAdapter(ResponseStreamEvent).validate_python, Response.model_validate
