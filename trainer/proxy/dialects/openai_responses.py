"""OpenAI responses, as Codex speaks them (it speaks nothing else)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.capture.graph import Turn
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import KindHint, Request, Tools
from trainer.proxy.dialects.fields import a_count, a_list, a_name, a_string, an_object, arguments, fold_system, header, join, wrong
from trainer.proxy.dialects.openai_chat import ROLES, OpenAIChat, content_text
from trainer.proxy.dialects.reader import read
from trainer.proxy.dialects.responses_events import ResponsesEvents
from trainer.proxy.dialects.responses_items import Origin, answer_of, output, response
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.streaming import Writer

KNOWN = frozenset(
    {
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "store", "include",
        "max_output_tokens", "temperature", "top_p", "reasoning", "text", "truncation", "metadata", "user", "prompt_cache_key",
        "previous_response_id", "service_tier", "background", "top_logprobs", "safety_identifier",
    }
)  # fmt: skip
THREAD_HEADERS = ("thread-id", "x-session-id", "x-litellm-session-id")
"""Codex, OpenCode, OpenHands: one value per conversation, sub-agents have their own."""
TURN_METADATA = "x-codex-turn-metadata"
_RANK = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}
"""The order in which the proxy writes the items of one turn."""


class OpenAIResponses:
    def parse(self, body: Any, headers: Mapping[str, str]) -> Request:
        body = an_object(body, "the body")
        if body.get("previous_response_id"):
            raise _not_stored("previous_response_id")
        tools, origins, unnamed = read(body, _all_tools, body.get("tools") or [], "tools")
        messages = [Message("system", a_string(text, "instructions"))] if (text := body.get("instructions")) else []
        messages += _conversation(body.get("input"))
        if not any(message.role != "system" for message in messages):
            raise wrong("input", "a text or a list of at least one item")
        return Request(
            messages=fold_system(messages),
            tools=tools,
            model=a_name(body.get("model", ""), "model"),
            stream=body.get("stream") is True,
            max_tokens=a_count(body.get("max_output_tokens"), "max_output_tokens"),
            thread=header(headers, THREAD_HEADERS),
            kind_hint=_kind(headers.get(TURN_METADATA, "")),
            unknown=frozenset(body.keys() - KNOWN) | unnamed,
            origins=origins,
        )

    def encode(self, turn: Turn, request: Request, answer_id: str) -> dict[str, Any]:
        return response(request, answer_id, output(turn.message, request, answer_id), turn)

    def writer(self, request: Request, prompt_tokens: int, answer_id: str) -> Writer:
        return ResponsesEvents(request, answer_id)

    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        """The code `context_length_exceeded` ends Codex at once; LiteLLM knows an overflow by vLLM's words."""
        return OpenAIChat().refuse(refusal)


@dataclass(slots=True)
class _Assistant:
    """The items of one sampled turn, as far as they were read."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    rank: int = -1
    answer: str = ""
    """Which of the proxy's answers the items say they are from."""

    def goes_on(self, kind: str, item_id: Any) -> bool:
        """The proxy writes the text of a turn as one item, before the calls, and every item has the answer's id in its own."""
        after = _RANK[kind] > self.rank or (_RANK[kind] == self.rank and kind != "message")
        return after and (not self.answer or answer_of(item_id) in ("", self.answer))

    def message(self) -> Message:
        return Message("assistant", join(self.texts), tuple(self.calls), reasoning=join(self.thoughts) if self.thoughts else None)


def _conversation(items: Any) -> list[Message]:
    if isinstance(items, str):
        return [Message("user", items)]
    messages: list[Message] = []
    turn = _Assistant()
    for i, item in enumerate(a_list(items, "input")):
        where = f"input[{i}]"
        item = an_object(item, where)
        kind = a_string(item.get("type", "message"), f"{where}.type")
        sampled = kind in _RANK and (kind != "message" or item.get("role") == "assistant")
        if turn.rank >= 0 and not (sampled and turn.goes_on(kind, item.get("id"))):
            messages.append(turn.message())
            turn = _Assistant()
        if sampled:
            turn.answer = turn.answer or answer_of(item.get("id"))
            _sampled(turn, item, kind, where)
        else:
            messages.append(_given(item, kind, where))
    return [*messages, turn.message()] if turn.rank >= 0 else messages


def _sampled(turn: _Assistant, item: dict[str, Any], kind: str, where: str) -> None:
    turn.rank = _RANK[kind]
    if kind == "message":
        turn.texts.append(content_text(item.get("content"), f"{where}.content"))
    elif kind == "reasoning":
        # Codex drops the content and keeps the summary.
        for part in a_list(item.get("summary") or item.get("content") or [], f"{where}.summary"):
            turn.thoughts.append(a_string(an_object(part, f"{where}.summary").get("text", ""), f"{where}.summary.text"))
    else:
        name = _exposed(a_string(item.get("namespace") or "", f"{where}.namespace"), a_string(item.get("name"), f"{where}.name"))
        call_id = a_string(item.get("call_id"), f"{where}.call_id")
        if kind == "custom_tool_call":
            turn.calls.append(ToolCall(call_id, name, {"input": a_string(item.get("input"), f"{where}.input")}))
        else:
            turn.calls.append(ToolCall(call_id, name, arguments(a_string(item.get("arguments", ""), f"{where}.arguments"))))


def _given(item: dict[str, Any], kind: str, where: str) -> Message:
    """What the harness wrote. Items that are neither text nor a tool's answer are named in brackets: the policy reads text only."""
    if kind == "message":
        role = ROLES.get(a_string(item.get("role"), f"{where}.role"))
        if role not in ("system", "user"):
            raise wrong(f"{where}.role", "system, developer, user or assistant")
        return Message(role, content_text(item.get("content"), f"{where}.content"))
    if kind.endswith("_output"):
        text = content_text(item.get("output"), f"{where}.output")
        return Message("tool", text, tool_call_id=a_string(item.get("call_id"), f"{where}.call_id"))
    if kind == "item_reference":
        raise _not_stored(f"{where}.type item_reference")
    return Message("user", f"[{kind}]")


def _not_stored(what: str) -> Refusal:
    return Refusal(Reason.BAD_REQUEST, f"{what} is not supported: no response is stored here, send the whole input and `store: false`")


def _all_tools(items: Any, where: str) -> tuple[Tools, dict[str, Origin], frozenset[str]]:
    """A call by a tool's bare name, without its namespace, is taken for that tool where the name leaves no doubt."""
    tools, origins = Tools(), dict[str, Origin]()
    unnamed = _tools(a_list(items, where), where, "", tools, origins)
    times = Counter(origin.name for origin in origins.values())
    bare = {origin.name: origin for origin in origins.values() if times[origin.name] == 1}
    return tools, bare | origins, unnamed


def _tools(
    items: list[Any], where: str, namespace: str, tools: list[dict[str, Any]], origins: dict[str, Origin]
) -> frozenset[str]:  # fmt: skip
    """Flatten tools and namespaces of tools into functions. Returns names for what the policy cannot call, such as `web_search`."""
    unnamed: frozenset[str] = frozenset()
    for i, item in enumerate(items):
        at = f"{where}[{i}]"
        item = an_object(item, at)
        kind = a_string(item.get("type"), f"{at}.type")
        if kind == "namespace":
            inner = a_list(item.get("tools") or [], f"{at}.tools")
            if namespace:
                raise wrong(f"{at}.type", "function or custom inside a namespace")
            unnamed |= _tools(inner, f"{at}.tools", a_string(item.get("name"), f"{at}.name"), tools, origins)
        elif kind in ("function", "custom"):
            name = a_string(item.get("name"), f"{at}.name")
            exposed = _exposed(namespace, name)
            parameters: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            if kind == "function":
                parameters = an_object(item.get("parameters") or {"type": "object", "properties": {}}, f"{at}.parameters")
            description = a_string(item.get("description") or "", f"{at}.description")
            function = {"name": exposed, "description": description, "parameters": parameters}
            tools.append({"type": "function", "function": function})
            origins[exposed] = Origin("custom_tool_call" if kind == "custom" else "function_call", namespace, name)
        else:
            unnamed |= {f"tools.{kind}"}
    return unnamed


def _exposed(namespace: str, name: str) -> str:
    """The name by which the policy knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def _kind(metadata: str) -> KindHint:
    """Codex says what a request is for."""
    said = arguments(metadata)
    return "summary" if isinstance(said, dict) and said.get("request_kind") == "compaction" else ""
