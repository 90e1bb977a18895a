"""The connection to one client, between its request and the end of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import Message, Send

from trainer.proxy.dialects import Dialect
from trainer.proxy.refusal import Refusal

PIECE = 64 * 1024
JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed its connection, or takes nothing any more, before it had the whole answer."""


class Flow(Protocol):
    write_paused: bool
    """The client takes less than was written."""


class Connection(Protocol):
    """What the server tells of the connection of a request, and the short ways that most requests can take."""

    gone: asyncio.Future[None]
    """Done when it is lost."""
    flow: Flow

    def whole_body(self) -> bytes | None:
        """The body, once, if all of it is there; None when it has to be received."""
        ...

    def whole_answer(self, head: bytes, content: bytes) -> bool:
        """Write all of an answer at once; `head` ends behind its first header, the others follow. False when it has to be sent."""
        ...


class Line:
    """Knows at any time whether the client is there. Writing waits until the client has room, so nothing piles up for a slow one."""

    def __init__(self, connection: Connection, send: Send, patience: float) -> None:
        """`patience`: seconds that one write may take."""
        self._connection, self._send, self._patience = connection, send, patience
        self._gone, self._flow = connection.gone, connection.flow
        self.started = self.ended = False
        self.status = 0
        """Of the answer, when there is one."""

    async def wait(self, future: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Until `future` is done, or `seconds` have passed. Raises ClientGone."""
        if not (future.done() or self._gone.done()):
            await _first(future, self._gone, seconds)
        if self._gone.done():
            raise ClientGone

    async def answer(self, status: int, body: str | bytes, media_type: bytes = JSON) -> None:
        """A whole answer."""
        self.status = status
        content = body if isinstance(body, bytes) else body.encode()
        if self._gone.done():
            raise ClientGone
        if len(content) <= PIECE and self._connection.whole_answer(_LINES[status] + media_type, content):
            self.started = self.ended = True
            return
        await self._write(_head(status, media_type, (b"content-length", b"%d" % len(content))))
        await self._body(content, more=False)

    async def refuse(self, dialect: Dialect, refusal: Refusal) -> None:
        """Say no, if that can still be said: an answer that has begun just ends."""
        with contextlib.suppress(ClientGone):
            if not self.started:
                status, body = dialect.refuse(refusal)
                await self.answer(status, json.dumps(body))
            elif not self.ended:
                await self.events("", more=False)

    async def begin(self) -> None:
        """The head of a stream of events."""
        self.status = 200
        await self._write(_head(200, EVENTS, (b"cache-control", b"no-cache")))

    async def events(self, text: str, *, more: bool) -> None:
        """Raises ClientGone, also for the last events when the client left before they were written."""
        await self._body(text.encode(), more=more)

    async def _body(self, content: bytes, *, more: bool) -> None:
        """In pieces, because the server waits for a slow client between two writes, not within one."""
        for at in range(0, max(1, len(content)), PIECE):
            last = at + PIECE >= len(content)
            await self._write({"type": "http.response.body", "body": content[at : at + PIECE], "more_body": more or not last})

    async def _write(self, message: Message) -> None:
        if self._gone.done():
            raise ClientGone
        self.started = True
        self.ended = message["type"] == "http.response.body" and not message.get("more_body")
        if not self._flow.write_paused:  # then it is written at once, and a timer is not needed
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None


_LINES = {status.value: b"HTTP/1.1 %d %s\r\ncontent-type: " % (status, status.phrase.encode()) for status in HTTPStatus}


async def _first(one: asyncio.Future[Any], other: asyncio.Future[Any], seconds: float | None) -> None:
    """Until one of the two is done or time is up: `asyncio.wait` without its sets, which every call would pay for."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = loop.call_later(seconds, wake) if seconds is not None else None
    one.add_done_callback(wake)
    other.add_done_callback(wake)
    try:
        await woken
    finally:
        one.remove_done_callback(wake)
        other.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


def _head(status: int, media_type: bytes, header: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", media_type), header]}
