"""OpenAI chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.capture.graph import Turn
from trainer.capture.message import Message, Role, ToolCall
from trainer.capture.request import Request, Tools
from trainer.proxy.blocks import Blocks, Call, Close, Delta, Event, Open
from trainer.proxy.dialects.fields import a_count, a_list, a_name, a_string, an_object, arguments, fold_system, header, join, sse, wrong
from trainer.proxy.dialects.reader import read, read_all
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.streaming import Writer

KNOWN = frozenset(
    {
        "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options",
        "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
        "stop", "seed", "user", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
        "frequency_penalty", "response_format", "reasoning_effort", "metadata", "store", "service_tier",
    }
)  # fmt: skip
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
THREAD_HEADERS = ("x-session-id", "x-litellm-session-id")
"""OpenCode, OpenHands: one value per conversation, sub-agents have their own."""
STATUS = {
    Reason.BAD_REQUEST: (400, "invalid_request_error"),
    Reason.TOO_LARGE: (413, "invalid_request_error"),
    Reason.SLOW: (408, "invalid_request_error"),
    Reason.BUSY: (429, "rate_limit_error"),
    Reason.UNAUTHORIZED: (401, "authentication_error"),
    Reason.OVERFLOW: (400, "invalid_request_error"),
    Reason.TURN_CAP: (400, "invalid_request_error"),
    # LiteLLM maps any other type or status to an error that mini-swe-agent retries ten times; this one aborts at once.
    Reason.NOT_FOUND: (404, "not_found_error"),
    Reason.ENDED: (404, "not_found_error"),
}


class OpenAIChat:
    def parse(self, body: Any, headers: Mapping[str, str]) -> Request:
        body = an_object(body, "the body")
        messages = read_all(body, _message, a_list(body.get("messages"), "messages"), "messages")
        if not messages:
            raise wrong("messages", "a list of at least one message")
        options = an_object(body.get("stream_options") or {}, "stream_options")
        return Request(
            messages=fold_system(messages),
            tools=read(body, _tools, body.get("tools") or [], "tools"),
            model=a_name(body.get("model", ""), "model"),
            stream=body.get("stream") is True,
            usage_in_stream=options.get("include_usage") is True,
            max_tokens=a_count(body.get("max_completion_tokens", body.get("max_tokens")), "max_tokens"),
            thread=header(headers, THREAD_HEADERS),
            unknown=frozenset(body.keys() - KNOWN),
        )

    def encode(self, turn: Turn, request: Request, answer_id: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.message.content or None}
        if reasoning := turn.message.reasoning:
            message["reasoning_content"] = reasoning
        if calls := [_tool_call(call) for call in turn.message.tool_calls]:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(turn)}
        return {**_head(request, answer_id, "chat.completion"), "choices": [choice], "usage": _usage(turn)}

    def writer(self, request: Request, prompt_tokens: int, answer_id: str) -> Writer:
        return _Chunks(request, answer_id)

    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        status, kind = STATUS[refusal.reason]
        message, code = refusal.message, str(refusal.reason)
        if refusal.reason in (Reason.OVERFLOW, Reason.TURN_CAP):
            code = "context_length_exceeded"
            message = (
                f"This model's maximum context length is {refusal.limit} tokens. However, your request has {refusal.tokens} input tokens. "
                f"({refusal.message})"
            )
        return status, {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _message(item: Any, where: str) -> Message:
    item = an_object(item, where)
    role = ROLES.get(a_string(item.get("role"), f"{where}.role"))
    if role is None:
        raise wrong(f"{where}.role", f"one of {', '.join(ROLES)}")
    content = content_text(item.get("content"), f"{where}.content")
    if role == "tool":
        return Message("tool", content, tool_call_id=a_string(item.get("tool_call_id", ""), f"{where}.tool_call_id"))
    if role != "assistant":
        return Message(role, content)
    calls = a_list(item.get("tool_calls") or [], f"{where}.tool_calls")
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    return Message(
        "assistant",
        content,
        tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def content_text(content: Any, where: str) -> str:
    """A string, null, or a list of parts. Parts that are no text are named in brackets: the policy reads text only."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [an_object(part, f"{where}[{i}]") for i, part in enumerate(a_list(content, where))]
    return join(
        a_string(part["text"], f"{where}.text") if part.get("type") in ("text", "input_text", "output_text") and "text" in part
        else f"[{part.get('type')}]"
        for part in parts
    )  # fmt: skip


def _call(item: Any, where: str) -> ToolCall:
    item = an_object(item, where)
    function = an_object(item.get("function"), f"{where}.function")
    raw = function.get("arguments", "")
    value = raw if isinstance(raw, dict) else arguments(a_string(raw, f"{where}.function.arguments"))
    return ToolCall(a_string(item.get("id", ""), f"{where}.id"), a_string(function.get("name"), f"{where}.function.name"), value)


def _tools(items: Any, where: str) -> Tools:
    return Tools(_tool(item, f"{where}[{i}]") for i, item in enumerate(a_list(items, where)))


def _tool(item: Any, where: str) -> dict[str, Any]:
    item = an_object(item, where)
    a_string(an_object(item.get("function"), f"{where}.function").get("name"), f"{where}.function.name")
    return item


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}


def _finish(turn: Turn) -> str:
    """A whole call is to be run, also when the tokens ran out behind it: OpenCode ends its loop at any other reason."""
    if turn.message.tool_calls:
        return "tool_calls"
    return "length" if turn.stop == "length" else "stop"


def _head(request: Request, answer_id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": int(time.time()), "model": request.model}


def _usage(turn: Turn) -> dict[str, int]:
    sampled = len(turn.sampled)
    return {"prompt_tokens": turn.prompt_tokens, "completion_tokens": sampled, "total_tokens": turn.prompt_tokens + sampled}


class _Chunks:
    def __init__(self, request: Request, answer_id: str) -> None:
        self._head, self._usage = _head(request, answer_id, "chat.completion.chunk"), request.usage_in_stream
        self._field = "content"
        self._calls = 0

    def start(self) -> str:
        return self._chunk({"role": "assistant", "content": ""})

    def write(self, events: Iterable[Event]) -> str:
        return "".join(self._one(event) for event in events)

    def keep_alive(self, blocks: Blocks) -> str:
        return self._chunk({})

    def end(self, turn: Turn) -> str:
        usage = sse({**self._head, "choices": [], "usage": _usage(turn)}) if self._usage else ""
        return self._chunk({}, _finish(turn)) + usage + sse("[DONE]")

    def break_off(self, error: dict[str, Any]) -> str:
        return sse(error)

    def _one(self, event: Event) -> str:
        match event:
            case Open(kind):
                self._field = "content" if kind == "text" else "reasoning_content"
                return ""
            case Delta(text):
                return self._chunk({self._field: text})
            case Close():
                return ""
            case Call(call):
                self._calls += 1
                return self._chunk({"tool_calls": [{"index": self._calls - 1, **_tool_call(call)}]})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> str:
        return sse({**self._head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})
