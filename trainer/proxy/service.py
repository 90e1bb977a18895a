"""The HTTP side: `{base}/r/{rollout_id}/v1/...`, one key per rollout, on the event loop of whoever starts it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from weakref import WeakValueDictionary

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trainer.capture.capture import Capture
from trainer.capture.graph import Turn
from trainer.capture.request import Request
from trainer.engine.base import Engine, Sampling
from trainer.proxy.dialects import Dialect
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.fields import load
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.limits import Limits
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.proxy.streaming import TurnStream

log = logging.getLogger(__name__)

MAX_BODY = 32 * 1024 * 1024
BODY_TIMEOUT_S = 60
KEEP_ALIVE_S = 600
"""Longer than an agent's commands take, so that a client does not write into a connection that is being closed."""


Handler = Callable[[HTTPRequest, Dialect, Session, Request], Awaitable[Response]]


class ClientGone(Exception):
    """The client closed its connection before it had an answer."""


class Proxy:
    """Serves all rollouts of one engine. Not thread-safe: everything runs on the loop that `start` was called on."""

    def __init__(self, engine: Engine, rendering: Rendering) -> None:
        self._engine, self._rendering = engine, rendering
        self._sessions: dict[str, Session] = {}
        self._closed_keys: dict[str, str] = {}
        self._captures: WeakValueDictionary[str, Capture] = WeakValueDictionary()
        self._url = ""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Bind and serve; port 0 takes a free one. Returns the base URL. Raises OSError when the address is taken."""
        listener = socket.create_server((host, port), backlog=2048)
        # Head and body of an answer are two writes: without this, the second waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._url = "http://{}:{}".format(*listener.getsockname()[:2])
        config = uvicorn.Config(
            self._app(), log_config=None, access_log=False, server_header=False, lifespan="off", ws="none",
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="proxy")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)
        return self._url

    async def open(self, rollout_id: str, key: str, sampling: Sampling, limits: Limits, harness: str) -> str:
        """Admit a rollout; returns the URL that its harness gets (it appends `/v1/...`).

        `sampling.max_tokens` is the longest turn. Raises ValueError for an id that was used.
        """
        if rollout_id in self._sessions or rollout_id in self._closed_keys:
            raise ValueError(f"rollout {rollout_id} was opened before; every attempt needs its own id")
        self._sessions[rollout_id] = Session(rollout_id, key, self._engine, self._rendering, sampling, limits, harness)
        return f"{self._url}/r/{rollout_id}"

    async def close(self, rollout_id: str) -> Capture:
        """End a rollout: calls under way are cancelled, later ones refused. A second close returns the same capture while it is held.

        Raises KeyError for an id that was never opened, or whose capture is gone.
        """
        session = self._sessions.pop(rollout_id, None)
        if session is None:
            return self._captures[rollout_id]
        self._closed_keys[rollout_id] = session.key
        self._captures[rollout_id] = session.capture
        capture = await session.close()
        log.info(
            "rollout closed: id=%s harness=%s turns=%d sampled_tokens=%d cancelled=%d turn_cap=%s over_length=%s failed=%s",
            rollout_id, capture.harness, capture.policy_turns, capture.sampled_tokens, capture.cancelled, capture.turn_cap_hit,
            capture.over_length, bool(capture.engine_error or capture.proxy_error),
        )  # fmt: skip
        release = getattr(self._engine, "release", None)
        if release is not None and inspect.isawaitable(released := release(rollout_id)):
            await released
        return capture

    async def stop(self) -> None:
        """Close what is open and stop listening."""
        for rollout_id in list(self._sessions):
            await self.close(rollout_id)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    def _app(self) -> Starlette:
        base, openai, anthropic = "/r/{rollout_id}", OpenAIChat(), Anthropic()
        return Starlette(
            routes=[
                Route(f"{base}/v1/chat/completions", self._guarded(openai, self._answer), methods=["POST"]),
                Route(f"{base}/v1/messages", self._guarded(anthropic, self._answer), methods=["POST"]),
                Route(f"{base}/v1/messages/count_tokens", self._guarded(anthropic, _count), methods=["POST"]),
                Route(f"{base}/v1/models", _models, methods=["GET"]),
                Route(base, _nothing, methods=["HEAD"]),
                Route(base + "/{rest:path}", _nothing, methods=["HEAD"]),
            ],
            exception_handlers={HTTPException: _no_such_path},
        )

    async def _answer(self, http: HTTPRequest, dialect: Dialect, session: Session, request: Request) -> Response:
        turn = await _unless_gone(http, session.answer(request))
        answer_id = str(turn.index)
        if request.stream:
            stream = TurnStream(self._rendering, turn.ids[: turn.scaffold], dialect.writer(request, turn.prompt_tokens, answer_id))
            return _Answer(turn, stream.start() + stream.finish(turn), media_type="text/event-stream")
        return _Answer(turn, json.dumps(dialect.encode(turn, request, answer_id)), media_type="application/json")

    def _guarded(self, dialect: Dialect, handle: Handler) -> Callable[[HTTPRequest], Awaitable[Response]]:
        """An endpoint that checks the key, parses the body, and answers every error in the dialect's own words."""

        async def endpoint(http: HTTPRequest) -> Response:
            session = None
            try:
                session = self._authorize(http)
                return await handle(http, dialect, session, dialect.parse(load(await _body(http)), http.headers))
            except Refusal as refusal:
                log.info("call refused: rollout=%s reason=%s %s", http.path_params.get("rollout_id"), refusal.reason, refusal.message)
                return _refused(dialect, refusal)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=499)
            except Exception as error:
                # A fault of ours must end as Failed(proxy) with the harness stopped, not as a retried 500 or a reward.
                log.exception("proxy failed on a call of rollout %s", http.path_params.get("rollout_id"))
                if session is not None:
                    session.capture.proxy_error = f"{type(error).__name__}: {error}"
                return _refused(dialect, Refusal(Reason.ENDED, "the proxy failed; this rollout cannot go on"))

        return endpoint

    def _authorize(self, http: HTTPRequest) -> Session:
        """The session of a request. The key is compared first and in constant time, so that a wrong one learns nothing more."""
        rollout_id = http.path_params["rollout_id"]
        session = self._sessions.get(rollout_id)
        key = session.key if session else self._closed_keys.get(rollout_id)
        if key is None:
            raise Refusal(Reason.NOT_FOUND, "no such rollout")
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        given = http.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise Refusal(Reason.UNAUTHORIZED, "wrong key for this rollout")
        if session is None:
            raise Refusal(Reason.NOT_FOUND, f"rollout {rollout_id} is closed")
        return session


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process's signals belong to the trainer."""
        yield


class _Answer(Response):
    """Marks its turn as sent once the whole body was written to a connection that was open."""

    def __init__(self, turn: Turn, content: str, media_type: str) -> None:
        super().__init__(content, media_type=media_type)
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._turn.sent = True


async def _count(http: HTTPRequest, dialect: Dialect, session: Session, request: Request) -> Response:
    """Claude Code decides by this number whether a file is too long to read, so it is part of the environment: real and repeatable."""
    return Response(json.dumps({"input_tokens": session.count(request)}), media_type="application/json")


async def _body(http: HTTPRequest) -> bytes:
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in http.stream():
                size += len(chunk)
                if size > MAX_BODY:
                    raise Refusal(Reason.TOO_LARGE, f"the body is larger than {MAX_BODY} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise Refusal(Reason.SLOW, f"the body did not arrive within {BODY_TIMEOUT_S} s") from None
    return b"".join(chunks)


async def _unless_gone(http: HTTPRequest, work: Awaitable[Turn]) -> Turn:
    """Wait for `work`, and cancel it when the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_hang_up(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _refused(dialect: Dialect, refusal: Refusal) -> Response:
    status, body = dialect.refuse(refusal)
    return Response(json.dumps(body), status, media_type="application/json")


async def _models(_: HTTPRequest) -> Response:
    """Answered without a key, and says nothing: any model name means the policy."""
    return Response('{"object":"list","data":[],"has_more":false,"first_id":null,"last_id":null}', media_type="application/json")


async def _nothing(_: HTTPRequest) -> Response:
    return Response()


async def _no_such_path(_: HTTPRequest, __: Exception) -> Response:
    body = {"error": {"type": "not_found_error", "message": "this proxy serves no such path or method"}}
    return Response(json.dumps(body), 404, media_type="application/json")
