"""Which hosts a sandbox's processes look up: a DNS responder in its network namespace, held by the host, that knows no name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox.environments.errors import SandboxError
from sandbox.environments.namespace.sandbox import Sandbox

_PROGRAM = Path(__file__).with_name("lookups_program.py")
_START_S = 20


@contextlib.asynccontextmanager
async def recorded(sandbox: Sandbox, names: set[str]) -> AsyncIterator[None]:
    """While the body runs, every name that is looked up in the sandbox is added to `names`. Raises SandboxError."""
    target = await sandbox.fork_target()
    descriptors = [target.namespaces[kind] for kind in ("net", "user") if kind in target.namespaces]
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_PROGRAM), *map(str, descriptors),
            pass_fds=descriptors, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env={},
        )  # fmt: skip
    finally:
        target.close()
    assert process.stdout is not None  # noqa: S101 -- asked for above
    try:
        async with asyncio.timeout(_START_S):
            if await process.stdout.readline() != b"ready\n":
                raise SandboxError("look-ups of the sandbox cannot be recorded: the responder did not start")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, 9)
        names.update(line.decode().strip() for line in (await process.stdout.read()).splitlines())
        await process.wait()
