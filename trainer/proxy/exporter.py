"""`GET /metrics` of a proxy, on a listener of its own: agents reach the proxy's port, and this is none of their business."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, Iterable

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Families = Callable[[], Iterable[Metric]]


class Exporter:
    """Listens on loopback, on the event loop of whoever starts it. `token` is one that no agent has."""

    def __init__(self, families: Families, token: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(families))
        self._expected = f"Bearer {token}".encode()
        app = Starlette(routes=[Route("/metrics", self._metrics)])
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1)
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """The base URL."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="metrics")
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def _metrics(self, request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._expected):
            return Response(status_code=401)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _Collector(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()
