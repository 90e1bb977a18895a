"""The HTTP side: `{base}/r/{rollout_id}/v1/...`, one key per rollout, on the event loop of whoever starts it."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from weakref import WeakValueDictionary

from prometheus_client.metrics_core import Metric

from trainer.capture.capture import Capture
from trainer.capture.samples import undelivered
from trainer.engine.base import Engine, ReportsKV, Sampling
from trainer.proxy.answering import answer
from trainer.proxy.counts import GONE, Counted, Counts
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.gate import Rule
from trainer.proxy.http import Server
from trainer.proxy.limits import MAX_CLOSED, MAX_NAME, MAX_UNKNOWN, Limits, Patience
from trainer.proxy.line import ClientGone, Line
from trainer.proxy.metrics import Metrics
from trainer.proxy.paths import Call, Endpoint, Paths
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.proxy.upstream import Upstream
from trainer.proxy.waiting import Gated

log = logging.getLogger(__name__)
ENDPOINTS = {
    "v1/chat/completions": Endpoint(OpenAIChat(), "openai_chat"),
    "v1/responses": Endpoint(OpenAIResponses(), "openai_responses"),
    "v1/messages": Endpoint(Anthropic(), "anthropic"),
    "v1/messages/count_tokens": Endpoint(Anthropic(), "anthropic_count_tokens", counts=True),
}


class Proxy:
    """Serves all rollouts of one engine. Not thread-safe: everything runs on the loop that `start` was called on."""

    def __init__(self, engine: Engine, rendering: Rendering, patience: Patience | None = None, admission: Rule | None = None) -> None:
        """`admission` puts a gate in front of the engine. Raises ValueError when the engine does not report its KV to it."""
        self._engine, self._rendering = engine, rendering
        self.patience = patience or Patience()
        self._upstream = Upstream(engine, self.patience)
        self._gated: Gated | None = None
        if admission is not None:
            if not isinstance(engine, ReportsKV):
                raise ValueError(f"an admission gate needs an engine that reports its KV, {type(engine).__name__} does not")
            self._gated = Gated(self._upstream, engine, admission)
        self._metrics = Metrics(engine, self._upstream, self._gated)
        self._counts = Counts()
        self._counted = Counted(self._gated or self._upstream, self._counts)
        self._sessions: dict[str, Session] = {}
        self._closed_keys: dict[str, str] = {}
        self._nobody = secrets.token_urlsafe(32)
        self._captures: WeakValueDictionary[str, Capture] = WeakValueDictionary()
        self._unknown_fields: set[str] = set()
        self._url = ""
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Bind and serve; port 0 takes a free one. Returns the base URL. Raises OSError when the address is taken."""
        listener = socket.create_server((host, port), backlog=2048)
        # Head and body of an answer are two writes: without this, the second waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._url = "http://{}:{}".format(*listener.getsockname()[:2])
        self._server = Server(Paths(ENDPOINTS, self.serve, self.patience.write), self.patience.head)
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
        self._sessions[rollout_id] = Session(rollout_id, key, self._counted, self._rendering, sampling, limits, harness)
        return f"{self._url}/r/{rollout_id}"

    async def close(self, rollout_id: str) -> Capture:
        """End a rollout: calls under way are cancelled, later ones refused. A second close returns the same capture while it is held.

        Raises KeyError for an id that was never opened, or whose capture is gone.
        """
        session = self._sessions.pop(rollout_id, None)
        if session is None:
            return self._captures[rollout_id]
        self._closed_keys[rollout_id] = session.key
        if len(self._closed_keys) > MAX_CLOSED:
            del self._closed_keys[next(iter(self._closed_keys))]
        self._captures[rollout_id] = session.capture
        capture = await session.close()
        self._counts.undelivered += len(undelivered(capture.graph.turns))
        log.info(
            "rollout closed: id=%s harness=%s turns=%d sampled_tokens=%d cancelled=%d turn_cap=%s over_length=%s failed=%s",
            rollout_id, capture.harness, capture.policy_turns, capture.sampled_tokens, capture.cancelled, capture.turn_cap_hit,
            capture.over_length, bool(capture.engine_error or capture.proxy_error),
        )  # fmt: skip
        release = getattr(self._engine, "release", None)
        if release is not None and inspect.isawaitable(released := release(rollout_id)):
            await released
        if self._gated is not None:
            self._gated.release(rollout_id)
        return capture

    def set_version(self, version: int) -> None:
        """The engine is about to have the weights of `version`: what is asked from now on must not meet older KV."""
        self._upstream.version = max(self._upstream.version, version)

    def take_metrics(self) -> dict[str, float]:
        """Step metrics of what happened since the last call."""
        return self._metrics.take()

    def families(self) -> Iterator[Metric]:
        """What happened since the start, for Prometheus."""
        waited, seconds = self._gated.waited if self._gated is not None else (0, 0.0)
        return self._counts.families(retries=self._upstream.resumed, sessions=len(self._sessions), waited=waited, waited_s=seconds)

    async def stop(self) -> None:
        """Close what is open and stop listening."""
        for rollout_id in list(self._sessions):
            await self.close(rollout_id)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    async def serve(self, call: Call, line: Line, endpoint: Endpoint) -> None:
        """One request of a rollout, whose errors are answered in the dialect's own words."""
        session, dialect = None, endpoint.dialect
        began, engine_s, gone = time.perf_counter(), None, False
        try:
            session = self._authorize(call)
            request = dialect.parse(session.reader.load(await call.body(self.patience.body)), call.headers)
            self._note(session, request.unknown)
            if endpoint.counts:  # Claude Code decides by this number whether a file is too long to read: real and repeatable
                await line.answer(200, json.dumps({"input_tokens": session.count(request)}))
            else:
                engine_s = await answer(line, dialect, session, request, self._rendering, self.patience)
                session.reader.settle()
        except Refusal as refusal:
            log.info("call refused: rollout=%r reason=%s %s", call.rollout_id, refusal.reason, refusal.message)
            await line.refuse(dialect, refusal)
        except ClientGone:
            gone = True
            log.info("client gone: rollout=%r", call.rollout_id)
        except Exception as error:
            # A fault of ours must end as Failed(proxy) with the harness stopped, not as a retried 500 or a reward.
            log.exception("proxy failed on a call of rollout %r", call.rollout_id)
            if session is not None:
                session.capture.proxy_error = f"{type(error).__name__}: {error}"
            await line.refuse(dialect, Refusal(Reason.ENDED, "the proxy failed; this rollout cannot go on"))
        finally:
            added = max(0.0, time.perf_counter() - began - engine_s) if engine_s is not None else None
            self._counts.call(endpoint.name, GONE if gone or not line.status else str(line.status), added)

    def _note(self, session: Session, unknown: frozenset[str]) -> None:
        """Fields that mean nothing here are named once in a run, with the rollout that had them first; no client can make that many."""
        if not unknown:
            return
        fresh = sorted({name[:MAX_NAME] for name in unknown} - self._unknown_fields)[: MAX_UNKNOWN - len(self._unknown_fields)]
        if fresh:
            self._unknown_fields.update(fresh)
            session.capture.unknown_fields.update(fresh)
            log.info("unknown request fields: rollout=%s %r", session.rollout_id, fresh)

    def _authorize(self, call: Call) -> Session:
        """The session of a request. Without its key, nobody learns whether there is such a rollout."""
        rollout_id = call.rollout_id
        session = self._sessions.get(rollout_id)
        key = session.key if session else self._closed_keys.get(rollout_id, self._nobody)
        scheme, _, token = call.headers.get("authorization", "").partition(" ")
        given = call.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise Refusal(Reason.UNAUTHORIZED, "no such rollout, or a wrong key for it")
        if session is None:
            raise Refusal(Reason.NOT_FOUND, f"rollout {rollout_id} is closed")
        return session
