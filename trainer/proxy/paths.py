"""The proxy's paths, `/r/{rollout_id}/v1/...`, as an ASGI application, and one request to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from trainer.proxy.dialects import Dialect
from trainer.proxy.http import error_in_all_dialects
from trainer.proxy.limits import MAX_BODY
from trainer.proxy.line import ClientGone, Connection, Line
from trainer.proxy.refusal import Reason, Refusal

MODELS = '{"object":"list","data":[],"has_more":false,"first_id":null,"last_id":null}'
"""Answered without a key, and says nothing: any model name means the policy."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is spoken at one path."""

    dialect: Dialect
    name: str
    """In metrics."""
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A request to an endpoint of a rollout; names of headers are in lower case, and the first of a name counts."""

    rollout_id: str
    headers: Mapping[str, str]
    receive: Receive
    connection: Connection

    async def body(self, seconds: float) -> bytes:
        """Raises ClientGone, Refusal(SLOW) and Refusal(TOO_LARGE)."""
        body = self.connection.whole_body()
        if body is None:
            body = await self._received(seconds)
        if len(body) > MAX_BODY:
            raise Refusal(Reason.TOO_LARGE, f"the body is larger than {MAX_BODY} bytes")
        return body

    async def _received(self, seconds: float) -> bytes:
        """What is too large is read to its end all the same, within bounds: a client that is still writing does not see an answer."""
        chunks, size, more = list[bytes](), 0, True
        try:
            async with asyncio.timeout(seconds):
                while more and size <= 4 * MAX_BODY:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    if size <= MAX_BODY:
                        chunks.append(chunk)
                    size += len(chunk)
        except TimeoutError:
            raise Refusal(Reason.SLOW, f"the body did not arrive within {seconds:g} s") from None
        return b"".join(chunks)


Serve = Callable[[Call, Line, Endpoint], Awaitable[None]]


class Paths:
    def __init__(self, endpoints: Mapping[str, Endpoint], serve: Serve, patience: float) -> None:
        """`endpoints` by what follows the rollout's id. `patience`: seconds that one write may take."""
        self._endpoints, self._serve, self._patience = endpoints, serve, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every call has a path of its own, and most are the first of these: no router is faster."""
        connection: Connection = scope["state"]["connection"]
        line = Line(connection, send, self._patience)
        _, root, rollout_id, rest = [*scope["path"].split("/", 3), "", "", "", ""][:4]
        method, known = scope["method"], root == "r" and bool(rollout_id)
        endpoint = self._endpoints.get(rest) if known and method == "POST" else None
        try:
            if endpoint is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
                await self._serve(Call(rollout_id, headers, receive, connection), line, endpoint)
            elif known and method == "HEAD":
                await line.answer(200, "")
            elif known and method == "GET" and rest == "v1/models":
                await line.answer(200, MODELS)
            else:
                await line.answer(404, error_in_all_dialects("not_found_error", "this proxy serves no such path or method"))
        except ClientGone:
            return
