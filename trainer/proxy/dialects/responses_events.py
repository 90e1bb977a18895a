"""OpenAI responses as server-sent events: every item is added, filled and done, and every event has a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainer.capture.graph import Turn
from trainer.capture.message import ToolCall
from trainer.capture.request import Request
from trainer.proxy.blocks import Blocks, Call, Close, Delta, Event, Kind, Open
from trainer.proxy.dialects import responses_items as items
from trainer.proxy.dialects.fields import sse


class ResponsesEvents:
    def __init__(self, request: Request, answer_id: str) -> None:
        self._request, self._answer_id = request, answer_id
        self._number = -1
        self._done: list[dict[str, Any]] = []
        self._kind: Kind = "text"
        self._words = ""

    def start(self) -> str:
        return self._event("response.created", response=self._response()) + self._event("response.in_progress", response=self._response())

    def write(self, events: Iterable[Event]) -> str:
        return "".join(self._one(event) for event in events)

    def keep_alive(self, blocks: Blocks) -> str:
        """Codex restarts its idle clock at any event; this one means nothing else to it."""
        return self._event("response.in_progress", response=self._response())

    def end(self, turn: Turn) -> str:
        response = items.response(self._request, self._answer_id, self._done, turn)
        return self._event(f"response.{response['status']}", response=response)

    def break_off(self, error: dict[str, Any]) -> str:
        said = {"code": error["error"]["code"], "message": error["error"]["message"]}
        return self._event("response.failed", response={**self._response(), "status": "failed", "error": said})

    def _one(self, event: Event) -> str:
        match event:
            case Open(kind):
                self._kind, self._words = kind, ""
                return self._opened()
            case Delta(text):
                self._words += text
                if self._kind == "thinking":
                    return self._event("response.reasoning_summary_text.delta", **self._part(), delta=text)
                return self._event("response.output_text.delta", **self._part(), delta=text, logprobs=[])
            case Close():
                return self._closed()
            case Call(call):
                return self._called(call)

    def _opened(self) -> str:
        item = self._item()
        if self._kind == "thinking":
            added = self._event("response.output_item.added", **self._at(), item={**item, "summary": []})
            return added + self._event("response.reasoning_summary_part.added", **self._part(), part=item["summary"][0])
        added = self._event("response.output_item.added", **self._at(), item={**item, "status": "in_progress", "content": []})
        return added + self._event("response.content_part.added", **self._part(), part=item["content"][0])

    def _closed(self) -> str:
        item = self._item()
        if self._kind == "thinking":
            text = self._event("response.reasoning_summary_text.done", **self._part(), text=self._words)
            part = self._event("response.reasoning_summary_part.done", **self._part(), part=item["summary"][0])
        else:
            text = self._event("response.output_text.done", **self._part(), text=self._words, logprobs=[])
            part = self._event("response.content_part.done", **self._part(), part=item["content"][0])
        return text + part + self._finished(item)

    def _called(self, call: ToolCall) -> str:
        item = items.tool_call(self._answer_id, len(self._done), call, self._request)
        field, name = ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        where = {**self._at(), "item_id": item["id"]}
        return (
            self._event("response.output_item.added", **self._at(), item={**item, field: "", "status": "in_progress"})
            + self._event(f"response.{name}.delta", **where, delta=item[field])
            + self._event(f"response.{name}.done", **where, **{field: item[field]}, name=item["name"])
            + self._finished(item)
        )

    def _finished(self, item: dict[str, Any]) -> str:
        event = self._event("response.output_item.done", **self._at(), item=item)
        self._done.append(item)
        return event

    def _item(self) -> dict[str, Any]:
        """The open item, as far as it is known."""
        make = items.text if self._kind == "text" else items.reasoning
        return make(self._answer_id, len(self._done), self._words)

    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self._done)}

    def _part(self) -> dict[str, Any]:
        """The one part of the open item."""
        index = "content_index" if self._kind == "text" else "summary_index"
        return {**self._at(), "item_id": items.item_id(self._kind, self._answer_id, len(self._done)), index: 0}

    def _response(self) -> dict[str, Any]:
        return items.response(self._request, self._answer_id, [], None)

    def _event(self, kind: str, /, **fields: Any) -> str:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)
