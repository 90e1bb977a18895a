"""The real proxy over a scripted policy: a process of the learning side (`python -m trainer.scripted`), one rollout each.

This side speaks to it by standard input and output, the harness by HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from server.schemas.scripted import ScriptedEnd, ScriptedOrder, ScriptedReady
from server.schemas.trials import ProxyEndpoint

_ANSWER_S = 180


class VerifyError(Exception):
    """The verification itself cannot run; the message says what to do."""


@dataclass(frozen=True)
class ScriptedProxy:
    endpoint: ProxyEndpoint
    process: asyncio.subprocess.Process

    async def close(self) -> ScriptedEnd:
        """End the rollout; what its capture holds. Raises VerifyError."""
        return ScriptedEnd.model_validate_json(await _ask(self.process, b"close\n"))


@contextlib.asynccontextmanager
async def scripted_proxy(order: ScriptedOrder) -> AsyncIterator[ScriptedProxy]:
    """Raises VerifyError when there is no learning side here, or it does not answer."""
    if importlib.util.find_spec("renderers") is None:
        raise VerifyError("the proxy belongs to the learning side, which is not installed here: run `uv sync --extra trainer --inexact`")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "trainer.scripted"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=64 << 20,
    )  # fmt: skip
    try:
        ready = ScriptedReady.model_validate_json(await _ask(process, order.model_dump_json().encode() + b"\n"))
        yield ScriptedProxy(ProxyEndpoint(url=ready.url, key=order.key), process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ask(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None  # noqa: S101 -- asked for when it was started
    process.stdin.write(line)
    try:
        async with asyncio.timeout(_ANSWER_S):
            if answer := await process.stdout.readline():
                return answer
    except TimeoutError:
        pass
    raise VerifyError("the proxy with the scripted policy did not answer; what it wrote is above")
