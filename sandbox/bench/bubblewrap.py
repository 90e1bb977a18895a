"""A bubblewrap command of the same shape as one cycle of ours, for comparison: namespaces, a read-only /usr, /bin/true, and gone."""

from __future__ import annotations

import asyncio
import resource
import shutil
import time
from statistics import median
from typing import Any

_COMMAND = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),  # noqa: S108
    *("--tmpfs", "/workspace", "--chdir", "/workspace", "/bin/true"),
)


async def run(n: int, concurrency: int) -> dict[str, Any]:
    """Figures of one-shot sandboxes; `absent` where there is no bubblewrap, as it is no part of this."""
    program = shutil.which("bwrap")
    if program is None:
        return {"absent": "bwrap is not on the PATH (Debian: apt-get install bubblewrap)"}

    async def cycle() -> float:
        begun = time.perf_counter()
        process = await asyncio.create_subprocess_exec(program, *_COMMAND, stderr=asyncio.subprocess.DEVNULL)
        if await process.wait() != 0:
            raise RuntimeError(f"{program} ended with {process.returncode}")
        return time.perf_counter() - begun

    before = _cpu_s()
    try:
        alone = [await cycle() for _ in range(n)]
        cpu = _cpu_s() - before
        turns = asyncio.Semaphore(concurrency)

        async def bounded() -> float:
            async with turns:
                return await cycle()

        begun = time.perf_counter()
        await asyncio.gather(*(bounded() for _ in range(n)))
    except RuntimeError as error:
        return {"absent": str(error)}
    return {
        "cycle_p50_ms": round(median(alone) * 1e3, 2),
        "cpu_ms_per_cycle": round(cpu / n * 1e3, 2),
        "cycles_per_s": round(n / (time.perf_counter() - begun), 1),
    }


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
