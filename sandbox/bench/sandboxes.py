"""`bench sandbox`: what making, using and ending a namespace sandbox costs on this machine."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil

from sandbox.environments.errors import SandboxError
from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.sandbox import Sandbox
from sandbox.environments.spec import SandboxSpec
from server.schemas.runspec import Limits

from . import bubblewrap, overhead

AT_ONCE = 64
_TRIALS = 32


async def run(n: int, concurrency: int) -> dict[str, Any]:
    """`n` sandboxes one after the other for the medians (ms of wall clock), `n` more at `concurrency` for the rate, then AT_ONCE held.

    `cpu_ms_per_cycle` is CPU of create + exec /bin/true + destroy, of this process and everything below it, less an idle spawner's.
    `mb_each` is the proportional memory of a held sandbox's process 1, None where the kernel does not let us read it. `load` is the
    machine's load average before and after: a wall clock on a busy machine is an upper bound.

    `variants` has the same cycle with the sandbox's files on disk (`limits.scratch: disk`), and one of bubblewrap; `trial` what a whole
    trial costs beside its agent.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        root = Path(directory)
        await asyncio.to_thread(_plant, root / "tree")
        figures = await _variant(root, "memory", n, concurrency)
        try:
            disk = await _variant(root, "disk", n, concurrency)
        except SandboxError as error:
            disk = {"absent": str(error)}
    variants = {"disk": disk, "bubblewrap": await bubblewrap.run(n, concurrency)}
    trial = await overhead.run(min(n, _TRIALS))
    return figures | {"variants": variants, "trial": trial, "load": [round(load, 1), round(os.getloadavg()[0], 1)]}


async def _variant(root: Path, scratch: Literal["memory", "disk"], n: int, concurrency: int) -> dict[str, Any]:
    spec = SandboxSpec(workspace=root / "tree", limits=Limits(scratch=scratch))
    before = _cpu_s()
    async with Host.open(root / "state"):
        pass
    idle = _cpu_s() - before
    begun, before = time.perf_counter(), _cpu_s()
    async with Host.open(root / "state") as host:
        started = time.perf_counter() - begun
        figures, errors = await _one_by_one(host, spec, n)
        mode, limits = host.mode, host.limits_mode
    cpu = _cpu_s() - before - idle
    async with Host.open(root / "state") as host:
        rate, failed = await _together(host, spec, n, concurrency)
    async with Host.open(root / "state") as host:
        held, memory = await _held(host, spec)
    return {
        "mode": mode,
        "limits": limits,
        "n": n,
        "spawner_start_ms": round(started * 1e3, 1),
        **{f"{name}_p50_ms": round(median(values) * 1e3, 2) for name, values in figures.items()},
        "cpu_ms_per_cycle": round(cpu / n * 1e3, 2),
        "concurrency": concurrency,
        "cycles_per_s": round(rate, 1),
        "at_once": held,
        "mb_each": memory,
        "errors": errors + failed + (AT_ONCE - held),
    }


def _plant(tree: Path) -> None:
    tree.mkdir()
    (tree / "main.py").write_text("print(1)\n")


async def _one_by_one(host: Host, spec: SandboxSpec, n: int) -> tuple[dict[str, list[float]], int]:
    figures: dict[str, list[float]] = {"ready": [], "exec": [], "destroy": []}
    errors = 0
    for _ in range(n):
        sandbox: Sandbox = await _timed(figures["ready"], host.create(spec))
        errors += (await _timed(figures["exec"], sandbox.exec(["/bin/true"]))).return_code != 0
        await _timed(figures["destroy"], sandbox.destroy())
    return figures, errors


async def _timed[T](figures: list[float], work: Awaitable[T]) -> T:
    begun = time.perf_counter()
    result = await work
    figures.append(time.perf_counter() - begun)
    return result


async def _together(host: Host, spec: SandboxSpec, n: int, concurrency: int) -> tuple[float, int]:
    """Cycles per second, and cycles that went wrong."""
    turns = asyncio.Semaphore(concurrency)

    async def cycle() -> bool:
        async with turns:
            try:
                sandbox = await host.create(spec)
                result = await sandbox.exec(["/bin/true"])
                await sandbox.destroy()
            except SandboxError:
                return False
            return result.return_code == 0

    begun = time.perf_counter()
    good = await asyncio.gather(*(cycle() for _ in range(n)))
    return sum(good) / (time.perf_counter() - begun), good.count(False)


async def _held(host: Host, spec: SandboxSpec) -> tuple[int, float | None]:
    """How many of AT_ONCE sandboxes were made and ran a command while all others were there, and the memory of each in MB."""
    made = await asyncio.gather(*(host.create(spec) for _ in range(AT_ONCE)), return_exceptions=True)
    alive = [sandbox for sandbox in made if isinstance(sandbox, Sandbox)]
    memory = await asyncio.to_thread(_memory_mb, host.pid)
    ran = await asyncio.gather(*(sandbox.exec(["/bin/true"]) for sandbox in alive), return_exceptions=True)
    await asyncio.gather(*(sandbox.destroy() for sandbox in alive), return_exceptions=True)
    return sum(not isinstance(result, BaseException) and result.return_code == 0 for result in ran), memory


def _memory_mb(spawner: int) -> float | None:
    try:
        sizes = [process.memory_full_info().pss for process in psutil.Process(spawner).children(recursive=True)]
    except psutil.Error:
        return None
    return round(median(sizes) / 2**20, 2) if sizes else None


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
