"""Running something in a pod: one exec, one process of `supervise.py`, one answer. The host's half of its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from sandbox.environments import child, namespace
from sandbox.environments.errors import NotStarted, SandboxError

from .api import Api, Busy
from .supervise import BEAT_S, END, STDERR, STDOUT

_STDIN, _OUT, _ERR, _STATUS = 0, 1, 2, 3
"""Channels of `v4.channel.k8s.io`: the first byte of every message."""
_BLOCK = 1 << 15
_SILENCE_S = 6 * BEAT_S
_ERRORS_KEPT = 4096
_TRIES, _PAUSE_S = 5, 0.2
_KILLED = re.compile(r"\b(exit code:?|exit status:?|code:) 137\b|signal: killed")
# Reads the texts of our modules and runs them. Nothing else is in the address of the request, which API servers log: no command, no secret.
_BOOT = """
import os, sys
def take(n):
    d = b""
    while len(d) < n:
        b = os.read(0, n - len(d))
        if not b: os._exit(3)
        d += b
    return d
texts = [take(int.from_bytes(take(8), "big")).decode() for _ in range(4)]
modules = [type(sys)(n) for n in ("sandbox.environments.child", "supervise", "operations")]
sys.modules[modules[0].__name__] = modules[0]
for text, module in zip(texts, modules):
    exec(compile(text, module.__name__, "exec"), module.__dict__)
modules[1].main(modules[2].__dict__, texts[3])
"""


class LostStatus(SandboxError):
    """The connection or the process at its other end went away before it said how the command ended."""

    def __init__(self, message: str, stdout: bytes, killed: bool = False) -> None:
        super().__init__(message)
        self.stdout = stdout
        self.killed = killed
        """By SIGKILL: nobody in a pod may do that to a process of root, so the kernel did, for want of memory."""


@dataclass
class Answer:
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    end: dict[str, Any] | None = None
    """What `supervise.py` said last; None when it never did."""


@cache
def _program() -> bytes:
    here = Path(__file__).parent
    texts = [Path(child.__file__), here / "supervise.py", here / "operations.py", Path(namespace.__file__).parent / "transfer.py"]
    return b"".join(len(text).to_bytes(8, "big") + text for text in (path.read_bytes() for path in texts))


async def ask(api: Api, pod: str, python: str, request: Mapping[str, Any], data: bytes = b"", seconds: float | None = None) -> Answer:
    """Run one request of `supervise.py` in a pod. `seconds` is how long it may take altogether; None is for ever, as long as it lives.

    Raises LostStatus when nobody said how it ended, NotStarted when a command could not be begun, SandboxError when
    anything else could not be done.
    """
    document = json.dumps({**request, "input": len(data)}).encode()
    head = _program() + len(document).to_bytes(8, "big") + document
    socket = await _open(api, pod, [python, "-I", "-S", "-B", "-c", _BOOT])
    reader = _Reader()
    try:
        async with asyncio.timeout(seconds):
            sending = asyncio.create_task(_send(socket, head, data))
            try:
                await reader.read(socket)
            finally:
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
                    await sending
    except TimeoutError:
        raise LostStatus(f"pod {pod}: no answer within {seconds:g} s", bytes(reader.answer.stdout)) from None
    finally:
        await socket.close()
    if reader.answer.end is None:
        words = reader.errors.decode(errors="replace").strip() or reader.status or "the connection closed"
        killed = _KILLED.search(reader.status) is not None
        raise LostStatus(f"pod {pod}: nobody said how the command ended: {words[-500:]}", bytes(reader.answer.stdout), killed)
    if "error" in reader.answer.end:
        refused = NotStarted if "status" in reader.answer.end else SandboxError
        error = refused(f"pod {pod}: {reader.answer.end['error']}")
        error.errno = reader.answer.end["errno"]
        raise error
    return reader.answer


async def _open(api: Api, pod: str, command: list[str]) -> aiohttp.ClientWebSocketResponse:
    """A kubelet that is busy, or has not heard of a container that runs, is asked again: nothing has been started yet."""
    for left in range(_TRIES - 1, -1, -1):
        try:
            return await api.exec(pod, command)
        except Busy:
            if not left:
                raise
            await asyncio.sleep(_PAUSE_S * (_TRIES - left))
    raise AssertionError("unreachable")


async def _send(socket: aiohttp.ClientWebSocketResponse, *parts: bytes) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            await socket.send_bytes(bytes([_STDIN]) + view[:_BLOCK])
            view = view[_BLOCK:]


class _Reader:
    def __init__(self) -> None:
        self.answer = Answer()
        self.errors = b""
        """What the process itself printed to its standard error."""
        self.status = ""
        self._rest = bytearray()

    async def read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Until the last word of the process, or of the connection."""
        while self.answer.end is None:
            try:
                message = await socket.receive(_SILENCE_S)
            except TimeoutError:
                self.status = f"silence for {_SILENCE_S} s"
                return
            if message.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                return
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            match data[:1]:
                case b"\x01":
                    self._take(data[1:])
                case b"\x02":
                    self.errors = (self.errors + data[1:])[-_ERRORS_KEPT:]
                case b"\x03":
                    self.status = _words(data[1:])

    def _take(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= 5:
            kind, length = struct.unpack_from(">BI", self._rest)
            if len(self._rest) < 5 + length:
                return
            body = bytes(self._rest[5 : 5 + length])
            del self._rest[: 5 + length]
            if kind == STDOUT:
                self.answer.stdout += body
            elif kind == STDERR:
                self.answer.stderr += body
            elif kind == END:
                self.answer.end = json.loads(body)


def _words(status: bytes) -> str:
    try:
        return str(json.loads(status).get("message", ""))
    except (ValueError, AttributeError):
        return status.decode(errors="replace")
