"""Serve an ASGI application on a loopback port, from a thread with an event loop of its own."""

from __future__ import annotations

import threading
import time

import uvicorn
from starlette.types import ASGIApp


class Served:
    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        config = uvicorn.Config(app, "127.0.0.1", port, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Drop every connection at once, as a killed process would."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
