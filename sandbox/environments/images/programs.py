"""The container tools that images are fetched and built with: found, run, and their failure told in one line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from sandbox.environments.errors import ImageError

_TAIL = 4000
_STOP_S = 10


def find(name: str, why: str) -> str:
    """The path of a program. Raises ImageError that says what to install."""
    path = shutil.which(name)
    if path is None:
        raise ImageError(f"{why} needs `{name}`, which is not installed here: install it (Debian: apt-get install {name})")
    return path


async def run(argv: Sequence[str], seconds: float, keep: int = 0) -> tuple[int, str]:
    """Exit status and the end of what the program printed. After `seconds` it is ended and ImageError raised.

    It gets SIGTERM first: these tools undo what they began. `keep` is a descriptor that it inherits.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(keep,) if keep else (),
        start_new_session=True,
    )
    output = bytearray()
    try:
        async with asyncio.timeout(seconds):
            await _read(process, output)
            await process.wait()
    except TimeoutError as error:
        raise ImageError(f"{Path(argv[0]).name} took longer than {seconds:.0f} s: {_words(output)[-300:]}") from error
    finally:
        await _end(process)
    return process.returncode or 0, _words(output)


async def _read(process: asyncio.subprocess.Process, output: bytearray) -> None:
    assert process.stdout is not None  # noqa: S101 -- asked for above
    while block := await process.stdout.read(1 << 16):
        output += block
        del output[:-_TAIL]


async def _end(process: asyncio.subprocess.Process) -> None:
    """The whole session: a build has children."""
    if process.returncode is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await process.wait()
                return


def _words(output: bytearray) -> str:
    return output.decode(errors="replace").strip()
