"""Run a command in a sandbox over a stream: the host's half of `launch_inside.py`.

The end of a command is a message of its own. A stream that ends without it is no exit code, whatever the engine says: `ended` is None then,
and the backend finds out what happened to the program on the other side.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.environments import child
from sandbox.environments.errors import NotStarted, SandboxError

from .stream import Reader, Stream

PROGRAM = Path(__file__).with_name("launch_inside.py")
MAX_ORDER = 192 * 1024
_COMPOSED = """import sys
module = sys.modules[{0!r}] = type(sys)({0!r})
exec(compile({1!r}, "child.py", "exec"), module.__dict__)
exec(compile({2!r}, "launch_inside.py", "exec"))
"""
_SEND = 1 << 20
_GRACE_S = 15


@dataclass(frozen=True)
class End:
    """`status` as `os.wait` gives it."""

    status: int
    timed_out: bool
    truncated: bool


@dataclass
class Ran:
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    ended: End | None = None
    noise: bytes = b""
    """Where something else than our program answered: its beginning."""


def command(python: str) -> list[str]:
    return [python, "-I", "-S", "-B", "-c", _program()]


@functools.cache
def _program() -> str:
    """Our two modules as one text: an import by full name finds what is in `sys.modules` and looks for no package around it."""
    return _COMPOSED.format(child.__name__, Path(child.__file__).read_text(encoding="utf-8"), PROGRAM.read_text(encoding="utf-8"))


def order(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    rlimits: Mapping[str, int],
    stdin: int,
    timeout_s: float | None,
    limits: tuple[int, int],
    cut: bool = False,
) -> bytes:
    """The bytes to send before the command's input. Raises SandboxError for one that is too long."""
    document = {
        "argv": list(argv),
        "env": dict(env),
        "cwd": cwd,
        "rlimits": dict(rlimits),
        "stdin": stdin,
        "seconds": timeout_s,
        "limits": limits,
        "cut": cut,
    }
    data = json.dumps(document).encode()
    if len(data) > MAX_ORDER:
        raise NotStarted(f"a request to the sandbox has {len(data)} bytes, more than {MAX_ORDER}: upload large input as a file")
    return len(data).to_bytes(4, "big") + data


async def run(stream: Stream, request: bytes, stdin: bytes, timeout_s: float | None, limits: tuple[int, int], ran: Ran) -> None:
    """Run to the end, filling `ran` as output comes: whoever gives up has what there was. The caller closes the stream.

    Raises SandboxError when nothing is heard of a command whose time was up.
    """
    try:
        async with asyncio.timeout(None if timeout_s is None else timeout_s + _GRACE_S):
            sending = asyncio.create_task(_send(stream, request, stdin))
            try:
                await _read(Reader(stream), ran, limits)
            finally:  # a command need not take its input, and a stream that broke ends for the reader too
                sending.cancel()
                await asyncio.wait([sending])
                if not sending.cancelled():
                    sending.exception()
    except TimeoutError:
        raise SandboxError(f"a command did not end within {_GRACE_S} s after its time was up") from None


async def _send(stream: Stream, request: bytes, stdin: bytes) -> None:
    await stream.send(request)
    for start in range(0, len(stdin), _SEND):
        await stream.send(stdin[start : start + _SEND])


async def _read(reader: Reader, ran: Ran, limits: tuple[int, int]) -> None:
    """The sender may be in an agent's hands: it never makes us keep more than the limits."""
    while head := await reader.exactly(5):
        size = int.from_bytes(head[1:], "big")
        if size > MAX_ORDER:
            ran.noise = head + await reader.rest(300)
            return
        content = await reader.exactly(size)
        if content is None:
            return
        match head[:1]:
            case b"o" if len(ran.stdout) + size <= limits[0]:
                ran.stdout += content
            case b"e" if len(ran.stderr) + size <= limits[1]:
                ran.stderr += content
            case b"x":
                ran.ended = _end(content)
                return
            case _:
                return


def _end(content: bytes) -> End | None:
    try:
        found = json.loads(content)
        return End(int(found["status"]) & 0xFFFF, bool(found["timed_out"]), bool(found["truncated"]))
    except (ValueError, KeyError, TypeError):
        return None
