"""Anthropic messages, as Claude Code speaks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.capture.graph import Turn
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import KindHint, Request, Tools
from trainer.proxy.dialects.anthropic_answer import AnthropicEvents, answer
from trainer.proxy.dialects.fields import a_count, a_list, a_name, a_string, an_object, arguments, fold_system, header, join, wrong
from trainer.proxy.dialects.reader import read, read_all
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.streaming import Writer

KNOWN = frozenset(
    {
        "model", "messages", "system", "tools", "tool_choice", "max_tokens", "metadata", "stop_sequences", "stream", "temperature",
        "top_p", "top_k", "thinking", "service_tier",
    }
)  # fmt: skip
BILLING = "x-anthropic-billing-header:"
"""First system line of Claude Code: its suffix is a fingerprint of the first user message, so it would break every shared prefix."""
THREAD_HEADERS = ("x-claude-code-agent-id", "x-session-id", "x-litellm-session-id")
"""Claude Code (absent on its main thread), OpenCode, OpenHands."""
SERVER_TOOLS = ("web_search_", "web_fetch_")
COMPACTION = "CRITICAL: Respond with TEXT ONLY"
STATUS = {
    Reason.BAD_REQUEST: (400, "invalid_request_error"),
    Reason.TOO_LARGE: (413, "request_too_large"),
    Reason.SLOW: (408, "timeout_error"),
    Reason.BUSY: (429, "rate_limit_error"),
    Reason.UNAUTHORIZED: (401, "authentication_error"),
    Reason.NOT_FOUND: (404, "not_found_error"),
    Reason.ENDED: (404, "not_found_error"),
    Reason.OVERFLOW: (400, "invalid_request_error"),
    Reason.TURN_CAP: (400, "invalid_request_error"),
}


class Anthropic:
    def parse(self, body: Any, headers: Mapping[str, str]) -> Request:
        body = an_object(body, "the body")
        messages = list(read(body, _system, body.get("system"), "system"))
        for made in read_all(body, _messages, a_list(body.get("messages"), "messages"), "messages"):
            messages += made
        if not any(message.role != "system" for message in messages):
            raise wrong("messages", "a list of at least one message")
        tools, unnamed = read(body, _tools, body.get("tools") or [], "tools")
        return Request(
            messages=fold_system(messages),
            tools=tools,
            model=a_name(body.get("model", ""), "model"),
            stream=body.get("stream") is True,
            max_tokens=a_count(body.get("max_tokens"), "max_tokens"),
            thread=header(headers, THREAD_HEADERS),
            kind_hint=_kind(body, messages[-1]),
            unknown=frozenset(body.keys() - KNOWN) | unnamed,
        )

    def encode(self, turn: Turn, request: Request, answer_id: str) -> dict[str, Any]:
        return answer(turn, request, answer_id)

    def writer(self, request: Request, prompt_tokens: int, answer_id: str) -> Writer:
        return AnthropicEvents(request, prompt_tokens, answer_id)

    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        status, kind = STATUS[refusal.reason]
        message = refusal.message
        if refusal.reason in (Reason.OVERFLOW, Reason.TURN_CAP):  # the one wording that Claude Code does not send again
            message = f"prompt is too long: {refusal.tokens} tokens > {refusal.limit} maximum"
        return status, {"type": "error", "error": {"type": kind, "message": message}}


def _kind(body: dict[str, Any], last: Message) -> KindHint:
    """Claude Code's side calls: a title in a JSON schema, a search by a tool of the server, a summary before it compacts."""
    tools = body.get("tools") or []
    if not tools and isinstance(body.get("output_config"), dict) and "format" in body["output_config"]:
        return "auxiliary"
    if tools and all(map(_of_server, tools)):
        return "auxiliary"
    return "summary" if last.role == "user" and f"\n{COMPACTION}" in f"\n{last.content}" else ""


def _system(system: Any, where: str) -> list[Message]:
    text = _text(system, where) if system is not None else ""
    lines = text.split("\n", 1)
    if lines[0].startswith(BILLING):
        text = lines[1] if len(lines) > 1 else ""
    return [Message("system", text)] if text else []


def _messages(item: Any, where: str) -> list[Message]:
    """One wire message is one message here, except that each tool result of a user message stands alone, in the order given."""
    item = an_object(item, where)
    role, content = item.get("role"), item.get("content")
    if role == "system":
        return [Message("system", _text(content, f"{where}.content"))]
    if role == "assistant":
        return [_assistant(content, f"{where}.content")]
    if role != "user":
        raise wrong(f"{where}.role", "user, assistant or system")
    if isinstance(content, str):
        return [Message("user", content)]
    messages: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(a_list(content, f"{where}.content")):
        at = f"{where}.content[{i}]"
        block = an_object(block, at)
        if block.get("type") != "tool_result":
            texts.append(_block_text(block, at))
            continue
        if texts:
            messages.append(Message("user", join(texts)))
            texts = []
        result = block.get("content")
        call_id = a_string(block.get("tool_use_id"), f"{at}.tool_use_id")
        messages.append(Message("tool", _text(result, f"{at}.content") if result is not None else "", tool_call_id=call_id))
    return [*messages, Message("user", join(texts))] if texts or not messages else messages


def _assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(a_list(content, where)):
        at = f"{where}[{i}]"
        kind = an_object(block, at).get("type")
        if kind == "tool_use":
            value = block.get("input", {})
            value = arguments(value) if isinstance(value, str) else value
            calls.append(ToolCall(a_string(block.get("id"), f"{at}.id"), a_string(block.get("name"), f"{at}.name"), value))
        elif kind == "thinking":
            thoughts.append(a_string(block.get("thinking"), f"{at}.thinking"))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, at))
    return Message("assistant", join(texts), tuple(calls), reasoning=join(thoughts) if thoughts else None)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    return join(_block_text(an_object(block, f"{where}[{i}]"), f"{where}[{i}]") for i, block in enumerate(a_list(content, where)))


def _block_text(block: dict[str, Any], where: str) -> str:
    """Blocks that are no text are named in brackets: the policy reads text only."""
    return a_string(block.get("text"), f"{where}.text") if block.get("type") == "text" else f"[{block.get('type')}]"


def _tools(items: Any, where: str) -> tuple[Tools, frozenset[str]]:
    """And names for what the policy cannot call, because no client would run it."""
    tools = {f"{where}[{i}]": an_object(item, f"{where}[{i}]") for i, item in enumerate(a_list(items, where))}
    unnamed = frozenset(f"tools.{tool['type']}" for tool in tools.values() if _of_server(tool))
    return Tools(_tool(tool, at) for at, tool in tools.items() if not _of_server(tool)), unnamed


def _of_server(tool: dict[str, Any]) -> bool:
    return str(tool.get("type")).startswith(SERVER_TOOLS)


def _tool(item: dict[str, Any], where: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": a_string(item.get("name"), f"{where}.name"),
            "description": a_string(item.get("description", ""), f"{where}.description"),
            "parameters": an_object(item.get("input_schema", {"type": "object", "properties": {}}), f"{where}.input_schema"),
        },
    }
