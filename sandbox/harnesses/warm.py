"""The runner's side of a warm parent: start it, have it fork a rollout into a sandbox, hear how the rollout ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from sandbox.environments.namespace.enter import ForkTarget

from .selfcontained import python_of

_HOME = "lego-warm-"
OUTPUT_LIMIT = 64 * 1024
_REPOSITORY = Path(__file__).parents[2]


class WarmStartError(Exception):
    """The parent did not come up, died, or could not place a child in the sandbox."""


class WarmRollout:
    """One forked harness process."""

    def __init__(self, connection: socket.socket, output: int) -> None:
        self._connection = connection
        self._output = output

    async def wait(self) -> tuple[int, bytes]:
        """Exit code (negative: signal) and the first 64 KiB of output. Raises WarmStartError when the sandbox was never entered."""
        loop = asyncio.get_running_loop()
        reader = asyncio.create_task(_read(self._output))
        try:
            answer = (await loop.sock_recv(self._connection, 4096)).decode()
        finally:
            self._connection.close()
            if not reader.done():
                await asyncio.wait([reader], timeout=1)  # a background process of the agent may hold the pipe open
                reader.cancel()
        output = b"" if reader.cancelled() or not reader.done() else reader.result()
        if not answer.lstrip("-").isdigit():
            raise WarmStartError(answer or "the warm parent died")
        if int(answer) == 126:
            raise WarmStartError(output.decode(errors="replace").strip() or "cannot enter the sandbox")
        return int(answer), output


class WarmParent:
    """A process that has imported a harness. `program` speaks the protocol of `mini_parent.py`. Started again when it dies."""

    def __init__(self, program: Path, tree: Path) -> None:
        self._program = program
        self._tree = tree
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def ensure(self, timeout_s: float = 120) -> socket.socket:
        """The control socket of a parent that is warm. Raises WarmStartError."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None or self._control is None:
                await self.stop()
                self._process, self._control = await _start(self._program, self._tree, timeout_s)
            return self._control

    async def fork(self, target: ForkTarget, order: dict[str, Any]) -> WarmRollout:
        """Fork a rollout into `target`. `order` goes to the child alone."""
        control = await self.ensure()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        reader, writer = os.pipe()
        try:
            target.send(ours)
            _send(ours, json.dumps(order).encode())
            socket.send_fds(control, [b"rollout"], [theirs.fileno(), writer])
        except OSError as error:
            ours.close()
            os.close(reader)
            raise WarmStartError(f"the warm parent cannot be reached: {error}") from error
        finally:
            theirs.close()
            os.close(writer)
        return WarmRollout(ours, reader)

    async def stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()


async def _start(program: Path, tree: Path, timeout_s: float) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a parent and wait until it is warm. Its environment is empty: no address and no key of this process reaches it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    command = [python_of(tree), "-I", "-B", str(program), str(tree), str(_REPOSITORY), str(theirs.fileno())]
    await asyncio.to_thread(_sweep_homes)
    with tempfile.TemporaryDirectory(prefix=f"{_HOME}{os.getpid()}-") as home, tempfile.TemporaryFile() as errors:
        environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8"}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environ,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        ready = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                ready = await asyncio.get_running_loop().sock_recv(ours, 64)
        if ready == b"ready":
            return process, ours
        ours.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        errors.seek(0)
        words = errors.read().decode(errors="replace").strip()
    raise WarmStartError(f"the warm parent of {tree.parent.name} did not start: {words[-800:] or f'no answer in {timeout_s:g} s'}")


def interpreter() -> str:
    """The host's own, without this process's virtual environment: what grades, as no task image need have one."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _send(rollout: socket.socket, order: bytes) -> None:
    """As a file in memory: the instruction may be longer than a datagram."""
    with open(os.memfd_create("order"), "wb+") as file:  # noqa: PTH123 -- a descriptor
        file.write(order)
        file.seek(0)
        socket.send_fds(rollout, [b"order"], [file.fileno()])


def _sweep_homes() -> None:
    """Remove homes that runners left which were killed while a parent of theirs was starting. Their names say whose they are."""
    for home in Path(tempfile.gettempdir()).glob(f"{_HOME}[0-9]*-*"):
        pid = home.name.removeprefix(_HOME).partition("-")[0]
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{pid}").exists() and home.lstat().st_uid == os.geteuid() and not home.is_symlink():
                shutil.rmtree(home)


async def _read(fd: int) -> bytes:
    """Everything from a pipe up to OUTPUT_LIMIT bytes; the rest is read and dropped so that the writer never blocks."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    kept = b""
    try:
        while chunk := await reader.read(65536):
            kept += chunk[: OUTPUT_LIMIT - len(kept)]
    finally:
        transport.close()
    return kept
