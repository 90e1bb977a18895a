"""An Anthropic messages endpoint that plays a script: what the model "says" is a list of turns, the client in front of it is real."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

Block = dict[str, Any]
Body = dict[str, Any]
Turn = Callable[[Body], list[Block]]
"""From the request that the client sent to the content blocks of the answer."""


def say(text: str) -> Block:
    return {"type": "text", "text": text}


def call(name: str, /, **arguments: Any) -> Block:
    return {"type": "tool_use", "name": name, "input": arguments}


def tool_results(body: Body) -> list[Block]:
    """All tool results in the conversation, oldest first, with `content` as text."""
    blocks = [b for m in body["messages"] if isinstance(m["content"], list) for b in m["content"] if b["type"] == "tool_result"]
    return [{**b, "content": _text(b["content"])} for b in blocks]


def _text(content: str | list[Block]) -> str:
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


class Script:
    """The turns still to be played, and every request that was answered by one."""

    def __init__(self, turns: list[Turn]) -> None:
        self.turns = list(turns)
        self.seen: list[Body] = []
        self.ids = count(1)
        self._lock = threading.Lock()

    def answer(self, body: Body) -> list[Block]:
        """Requests without tools are the client's own (titles, summaries) and take no turn."""
        with self._lock:
            if not body.get("tools"):
                return [say("ok")]
            self.seen.append(body)
            if not self.turns:
                return [say("The script is over.")]
            return self.turns.pop(0)(body)


@contextmanager
def scripted_anthropic(script: Script) -> Iterator[str]:
    """Serve the script on a free loopback port; yields the base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(script))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._reply("application/json", b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if "count_tokens" in self.path:
                self._reply("application/json", b'{"input_tokens": 100}')
                return
            message = _message(script, body)
            if body.get("stream"):
                self._reply("text/event-stream", b"".join(_events(message)))
            else:
                self._reply("application/json", json.dumps(message).encode())

        def _reply(self, kind: str, content: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


def _message(script: Script, body: Body) -> dict[str, Any]:
    content = [{**b, "id": f"toolu_{next(script.ids):08d}"} if b["type"] == "tool_use" else b for b in script.answer(body)]
    return {
        "id": f"msg_{next(script.ids):08d}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content,
        "stop_reason": "tool_use" if any(b["type"] == "tool_use" for b in content) else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 100, "output_tokens": 20, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def _events(message: dict[str, Any]) -> Iterator[bytes]:
    yield _event("message_start", message={**message, "content": [], "stop_reason": None})
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            start, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        yield _event("content_block_start", index=index, content_block=start)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta={"stop_reason": message["stop_reason"], "stop_sequence": None}, usage=message["usage"])
    yield _event("message_stop")


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()
