"""Looks after all containers of one owner: an engine has no limit for disk or CPU seconds, and tells of a lack of memory as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Any

from sandbox.environments.errors import SandboxError

from . import collect
from .container import OWNER
from .engine import Engine
from .sandbox import DockerSandbox

log = logging.getLogger(__name__)

_EVERY_S = 2.0


class Watch:
    """`sandboxes` are looked at from `add` to `drop`, by container."""

    def __init__(self, engine: Engine, token: str) -> None:
        self._engine = engine
        self._label = f"{OWNER}={token}"
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._looking = asyncio.create_task(self._look())
        self._loop = asyncio.get_running_loop()
        self._events: Any = None
        self._stopped = False
        self._listening = threading.Thread(target=self._listen, name="docker-events", daemon=True)
        self._listening.start()

    def add(self, sandbox: DockerSandbox) -> None:
        self._sandboxes[sandbox.container] = sandbox

    def drop(self, container: str) -> None:
        self._sandboxes.pop(container, None)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            if not self._sandboxes:
                continue
            try:
                found = await self._engine.call(self._engine.api.containers, size=True, filters={"label": self._label})
            except SandboxError as error:
                log.warning("the containers' disk and CPU cannot be watched: %s", error)
                continue
            for container in found:  # one request tells of every container's disk
                if (sandbox := self._sandboxes.get(container["Id"])) is not None:
                    with contextlib.suppress(SandboxError):  # it ended meanwhile
                        await self._judge(sandbox, int(container.get("SizeRw") or 0))

    async def _judge(self, sandbox: DockerSandbox, used: int) -> None:
        limits, marks = sandbox.spec.limits, sandbox.marks
        marks.disk_used = max(marks.disk_used, used)
        marks.disk_full = marks.disk_full or used > limits.disk_mb << 20
        stats = await self._engine.call(self._engine.api.stats, sandbox.container, stream=False, one_shot=True)
        cpu_ns = stats.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0)
        marks.cpu_exceeded = marks.cpu_exceeded or cpu_ns > limits.cpu_s * 1_000_000_000
        if marks.disk_full or marks.cpu_exceeded:
            await self._engine.call(collect.kill, self._engine.api, sandbox.container)

    def _listen(self) -> None:
        """Thread: count the events `oom`, which the engine sends for every process, not only for a container's first."""
        with contextlib.suppress(Exception):  # the SDK's stream ends with any of a dozen errors when it is closed, or the engine is
            filters = {"type": "container", "event": "oom", "label": self._label}
            self._events = self._engine.api.events(filters=filters, decode=True)
            if self._stopped:
                self._events.close()
            for event in self._events:
                self._loop.call_soon_threadsafe(self._out_of_memory, event.get("id", ""))

    def _out_of_memory(self, container: str) -> None:
        if (sandbox := self._sandboxes.get(container)) is not None:
            sandbox.marks.out_of_memory += 1

    async def stop(self) -> None:
        self._stopped = True
        self._looking.cancel()
        if self._events is not None:
            with contextlib.suppress(Exception):  # as above
                await asyncio.to_thread(self._events.close)
        await asyncio.wait([self._looking])
