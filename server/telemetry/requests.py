"""Requests to the control plane, counted and timed. The label is a route's pattern: what a client writes never becomes one."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 30, float("inf"))
"""Seconds; long polls last up to half a minute."""


class RequestMetrics:
    """ASGI middleware. `registry` belongs to one app."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        labels = ["method", "route", "status"]
        help = "Requests to the control plane."
        self._seconds = Histogram("lego_rl_http_request_seconds", help, labels, buckets=BUCKETS, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._seconds.labels(scope["method"], route, str(status)).observe(time.perf_counter() - started)
