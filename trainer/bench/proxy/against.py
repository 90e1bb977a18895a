"""Other gateways under the same load: `rllm-model-gateway` and Agent Lightning's server, each started as its documentation says.

They forward text to the engine's chat endpoint and log what comes back; the engine tokenises for them. Neither is a dependency: they run
in the interpreter of an environment that has them.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from trainer.bench.proxy.load import Target, Usage
from trainer.bench.proxy.processes import child
from trainer.bench.proxy.traffic import KEY

MODEL = "policy"
READY_S = 60


@dataclass(frozen=True, slots=True)
class Server:
    """`argv` takes the port to listen on and the engine's base URL."""

    name: str
    module: str
    argv: Callable[[int, str], list[str]]
    health: str
    register: tuple[str, str]
    """Where, and under which name of its field, a rollout is announced; empty when it need not be."""
    calls: str
    """Path of a rollout's calls, with the rollout's name for {}."""

    @asynccontextmanager
    async def start(self, python: Path, engine_port: int) -> AsyncIterator[Target]:
        """Raises RuntimeError when it does not come up."""
        port, engine_url = _free_port(), f"http://127.0.0.1:{engine_port}/v1"
        async with child(str(python), "-m", self.module, *self.argv(port, engine_url), pipes=False) as process:
            headers = {"authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False) as client:
                await _ready(client, self.health, process)
                if self.register[0]:
                    (await client.post("/api/models", json=[{"model": MODEL, "endpoint": engine_url}])).raise_for_status()
                yield _Gateway(self, client, psutil.Process(process.pid))


SERVERS = (
    Server(
        "rllm-model-gateway",
        "rllm_model_gateway",
        lambda port, engine: [
            *("--host", "127.0.0.1", "--port", str(port), "--worker", engine, "--store", "memory", "--log-level", "warning")
        ],
        "/health",
        ("", ""),
        "/sessions/{}/v1/chat/completions",
    ),
    Server(
        "agentlightning",
        "agentlightning.server",
        lambda port, _: [
            *("host=127.0.0.1", f"port={port}", f"key={KEY}", f"default_proxy.model_name={MODEL}"),
            *("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"),
        ],
        "/healthz",
        ("/api/rollouts", "rollout_id"),
        "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions",
    ),
)


def installed(pythons: Sequence[Path]) -> list[tuple[Server, Path]]:
    """The gateways that each interpreter can import; this one is asked too."""
    found: dict[str, tuple[Server, Path]] = {}
    for python in [*pythons, Path(sys.executable)]:
        for server in SERVERS:
            probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({server.module.partition('.')[0]!r}) is None)"
            if server.name not in found and subprocess.run([str(python), "-c", probe], check=False).returncode == 0:
                found[server.name] = (server, python)
    return list(found.values())


class _Gateway:
    def __init__(self, server: Server, client: httpx.AsyncClient, process: psutil.Process) -> None:
        self._server, self._client, self._process = server, client, process

    async def open(self, session: str) -> str:
        path, field = self._server.register
        if path:
            (await self._client.post(path, json=[{"input": "", field: session}])).raise_for_status()
        return f"{self._client.base_url}".rstrip("/") + self._server.calls.format(session)

    async def close(self, session: str) -> None:
        """They keep every rollout until somebody deletes it."""

    async def usage(self) -> Usage:
        times = self._process.cpu_times()
        return Usage(times.user + times.system, self._process.memory_info().rss / 1e6)


async def _ready(client: httpx.AsyncClient, path: str, process: asyncio.subprocess.Process) -> None:
    for _ in range(READY_S * 10):
        if process.returncode is not None:
            break
        try:
            if (await client.get(path)).is_success:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway did not come up within {READY_S} s (exit status {process.returncode}); its last words are above")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
