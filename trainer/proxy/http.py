"""The HTTP server under the proxy: no signals, and errors of its own that every client can read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trainer.proxy.limits import MAX_CONNECTIONS, MAX_HEAD, MAX_PIPELINED

LINGER_S = 1
KEEP_ALIVE_S = 600
"""Longer than an agent's commands take, so that a client does not write into a connection that is being closed."""


class Server(uvicorn.Server):
    """One that leaves the process's signals alone."""

    def __init__(self, app: ASGIApp, head_timeout: float) -> None:
        """`head_timeout`: seconds until a new connection has sent the head of a request."""

        class Protocol(_Protocol):
            patience = head_timeout

        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Joining:
    """A transport that writes the head of an answer together with what comes right behind it: two writes wake the client twice, and the
    first one may have to wait until the client has read the head."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


class _Protocol(HttpToolsProtocol):
    """Implements `Connection`. The short ways are for a request that nothing is special about and behind which no other waits."""

    patience: float
    refused = False
    silence: asyncio.TimerHandle | None = None
    in_head = True
    head = 0
    """Bytes since the end of the request before, as long as `in_head`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joining(transport, self.loop))  # type: ignore[arg-type]
        self.gone: asyncio.Future[None] = self.loop.create_future()
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self.silence = self.loop.call_later(self.patience, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        self.head += len(data)
        super().data_received(data)
        if self.in_head and self.head > MAX_HEAD and not self.refused:
            self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.silence is not None:
            self.silence.cancel()  # it would hold the connection's memory for as long as it had patience
        self._lose()

    def _lose(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    def on_body(self, body: bytes) -> None:
        if self.cycle.body or self.cycle.response_complete:
            super().on_body(body)
        else:  # most bodies come in one piece, which need not be copied
            self.cycle.body = body  # type: ignore[assignment]
            self.cycle.message_event.set()

    def whole_body(self) -> bytes | None:
        cycle = self.cycle
        if self.pipeline or cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected or cycle.response_complete:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def whole_answer(self, head: bytes, content: bytes) -> bool:
        cycle = self.cycle
        used = cycle.more_body or cycle.response_started or cycle.disconnected or self.flow.write_paused
        if self.pipeline or used or not cycle.keep_alive or cycle.scope["method"] == "HEAD":
            return False
        own = b"".join([b"%b: %b\r\n" % header for header in self.server_state.default_headers])
        cycle.response_started = cycle.response_complete = True
        self.transport.write(b"%b\r\ncontent-length: %d\r\n%b\r\n%b" % (head, len(content), own, content))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED and not self.refused:
            self.refused = True
            self.transport.abort()

    def on_message_complete(self) -> None:
        self.in_head, self.head = True, 0
        super().on_message_complete()
        self.flow.resume_reading()  # which a large body had paused: else nobody would see the client go

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has too long a head, has no path and so no dialect: the answer is one in all of them.

        Closing on unread data would reset the connection and lose the answer, so the rest is read and thrown away for a moment. A request
        before it that has no answer yet gets none: a client that cannot speak HTTP is as good as gone.
        """
        self.refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self._lose()
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        body = error_in_all_dialects("invalid_request_error", "this is no HTTP request, or its head is too long").encode()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def error_in_all_dialects(kind: str, message: str) -> str:
    return json.dumps({"type": "error", "error": {"type": kind, "message": message, "param": None, "code": None}})
