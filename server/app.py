"""The control plane as an ASGI app: wiring only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio.to_thread
from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry

from .changes import Changes
from .checks.service import CheckService
from .context import Context
from .db import Database
from .errors import install_handlers
from .launchers.follower import Follower
from .launchers.process import ProcessLauncher
from .launchers.revive import revive
from .routes import checks as check_routes
from .routes import diagnosis, events, findings, info, plans, regrades, runs, tasks, telemetry, trials
from .security import LOOPBACK_NAMES, Guard, Perimeter, load_or_create_token
from .settings import Settings
from .telemetry.requests import RequestMetrics
from .ui import machines, pages
from .version import VERSION

if TYPE_CHECKING:
    from .telemetry.tracing import TraceSender


def create_app(settings: Settings) -> FastAPI:
    """Nothing happens before the app's lifespan begins: it opens the database, migrates it and reads the token."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        db = Database(settings.resolved_database_url)
        await anyio.to_thread.run_sync(db.migrate)
        token = load_or_create_token(settings.data.token)
        launcher, changes = ProcessLauncher(settings, db), Changes(asyncio.get_running_loop())
        guard, checks = Guard(token, open_reads=settings.is_loopback), CheckService(settings, db, changes)
        app.state.context = Context(settings=settings, db=db, guard=guard, changes=changes, launcher=launcher, checks=checks)
        follower = Follower(settings, db, launcher, changes)
        traces = _traces(settings, db)
        await anyio.to_thread.run_sync(revive, settings, db, launcher)
        await anyio.to_thread.run_sync(follower.start)
        await anyio.to_thread.run_sync(checks.recover)
        try:
            yield
        finally:
            if traces is not None:
                await anyio.to_thread.run_sync(traces.stop)
            await anyio.to_thread.run_sync(follower.stop)
            await anyio.to_thread.run_sync(checks.close)
            db.close()

    app = FastAPI(title="lego-rl", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    names = (*LOOPBACK_NAMES, settings.host, *settings.hostnames)
    hostnames = frozenset(name.lower() for name in names) if settings.is_loopback else None
    app.state.requests = CollectorRegistry()
    app.add_middleware(RequestMetrics, registry=app.state.requests)
    app.add_middleware(Perimeter, hostnames=hostnames)
    install_handlers(app)
    for routes in (info, check_routes, plans, runs, events, trials, regrades, tasks, findings, diagnosis, telemetry):
        app.include_router(routes.router)
    app.include_router(pages.router)
    app.include_router(machines.router)
    app.mount("/static", StaticFiles(packages=[("server.ui", "static")]), name="static")
    return app


def _traces(settings: Settings, db: Database) -> TraceSender | None:
    if settings.otlp_url is None:
        return None
    from .telemetry.tracing import TraceSender  # late: its libraries are an extra

    sender = TraceSender(settings, db, settings.otlp_url)
    sender.start()
    return sender
