"""`bench sandbox`: what making, using and ending a namespace sandbox costs on this machine."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import Any

from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.sandbox import Sandbox
from sandbox.environments.namespace.spec import SandboxSpec


async def run(n: int, concurrency: int) -> dict[str, Any]:
    """`n` sandboxes one after the other for the medians (ms of wall clock), then `n` more at `concurrency` for the rate.

    `cpu_ms` is CPU of the whole cycle create + exec /bin/true + destroy, of this process and everything below it, less an idle spawner's.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        root = Path(directory)
        tree = root / "tree"
        await asyncio.to_thread(_plant, tree)
        before = _cpu_s()
        async with Host.open(root / "state"):
            pass
        idle = _cpu_s() - before
        begun, before = time.perf_counter(), _cpu_s()
        async with Host.open(root / "state") as host:
            started = time.perf_counter() - begun
            figures = await _one_by_one(host, tree, n)
            mode, limits = host.mode, host.limits_mode
        cpu = _cpu_s() - before - idle
        async with Host.open(root / "state") as host:
            rate = await _together(host, tree, n, concurrency)
    return {
        "mode": mode,
        "limits": limits,
        "n": n,
        "start_ms": round(started * 1e3, 1),
        **{f"{name}_ms": round(median(values) * 1e3, 2) for name, values in figures.items()},
        "cpu_ms": round(cpu / n * 1e3, 2),
        "concurrency": concurrency,
        "per_s": round(rate, 1),
    }


def _plant(tree: Path) -> None:
    tree.mkdir()
    (tree / "main.py").write_text("print(1)\n")


async def _one_by_one(host: Host, tree: Path, n: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"create": [], "exec": [], "destroy": []}
    for _ in range(n):
        sandbox: Sandbox = await _timed(figures["create"], host.create(SandboxSpec(workspace=tree)))
        await _timed(figures["exec"], sandbox.exec(["/bin/true"]))
        await _timed(figures["destroy"], sandbox.destroy())
    return figures


async def _timed[T](figures: list[float], work: Awaitable[T]) -> T:
    begun = time.perf_counter()
    result = await work
    figures.append(time.perf_counter() - begun)
    return result


async def _together(host: Host, tree: Path, n: int, concurrency: int) -> float:
    """Cycles per second."""
    turns = asyncio.Semaphore(concurrency)

    async def cycle() -> None:
        async with turns:
            sandbox = await host.create(SandboxSpec(workspace=tree))
            await sandbox.exec(["/bin/true"])
            await sandbox.destroy()

    begun = time.perf_counter()
    await asyncio.gather(*(cycle() for _ in range(n)))
    return n / (time.perf_counter() - begun)


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
