"""A running sandbox, from asyncio: start processes, move files, open and close the gate, kill, collect, destroy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sandbox.environments import archive
from sandbox.environments.archive import Change
from sandbox.environments.errors import NotStarted, SandboxError, SandboxLost
from sandbox.environments.spec import DEFAULT_ENV, ExecResult, LimitsMode, SandboxSpec, UsageReport, User

from .channel import Call, Channel
from .enter import ForkTarget
from .gate import Gate
from .pipes import Collector, memory_file
from .preflight import Mode
from .spawner import UNKNOWN_ERROR

GATE_PORT = 8000
_OURS = ("HOME", "USER", "TMPDIR")
"""What an image cannot set: its own values are those of another user."""
_KILL_S = 10
_TRANSFER_S = 60


class Sandbox:
    """Made by `Host.create`. After `kill` only `usage`, `changes`, `download` and `destroy` work."""

    def __init__(
        self,
        spawner: Channel,
        control: Channel,
        spec: SandboxSpec,
        mode: Mode,
        limits_mode: LimitsMode,
        created: dict[str, Any],
        rlimits: dict[str, int],
        image_env: Mapping[str, str],
    ) -> None:
        self._spawner = spawner
        self._control = control
        self._number = created["sandbox"]
        self._cgroups = tuple(created["cgroups"])
        self._rlimits = rlimits
        self._gate: Gate | None = None
        self._crowded = False
        self._shell: str = created["shell"]
        self._env = {**DEFAULT_ENV, **{name: value for name, value in image_env.items() if name not in _OURS}}
        self.spec = spec
        self.mode = mode
        self.limits_mode = limits_mode
        self.uid: int = created["uid"]

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: User = "agent",
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        max_output: int | None = None,
    ) -> ExecResult:
        """Run a command (a str by the shell) to its end. Processes that it leaves behind live on until `kill`.

        `env` is added to `spec.DEFAULT_ENV`; `max_output` bounds each stream, in bytes (default: from the spec). After `timeout_s`
        or when the caller is cancelled its process group gets SIGKILL. Raises SandboxLost when the sandbox died, NotStarted when it
        cannot start a process (for one, at its process limit).
        """
        argv = [self._shell, "-c", command] if isinstance(command, str) else list(command)
        request = {"op": "exec", "argv": argv, "env": {**self._env, **(env or {})}, "cwd": cwd or self.spec.workdir, "user": user}
        limit = max_output if max_output is not None else self.spec.limits.output_kb << 10
        return await self._run(request, timeout_s, stdin, (limit, limit))

    async def _run(
        self, request: dict[str, Any], timeout_s: float | None, stdin: bytes | None, limits: tuple[int, int], cut: bool = False
    ) -> ExecResult:
        source = memory_file(stdin) if stdin else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        out, err = Collector(limits[0], cut), Collector(limits[1])
        timed_out = False
        call: Call | None = None
        try:
            try:
                call = await self._control.call(request, (source, out.writer, err.writer))
            finally:
                os.close(source)
                out.started()
                err.started()
            try:
                async with asyncio.timeout(timeout_s):
                    await call.started
                    status = await asyncio.shield(call.done)
            except TimeoutError:
                timed_out = True
                status = await self._stop(call)
        except asyncio.CancelledError:
            if call is not None:
                with contextlib.suppress(SandboxError):  # a sandbox that is gone has no process to stop
                    await self._stop(call)
            raise
        except SandboxLost as lost:
            lost.stdout = out.finish()
            raise
        except SandboxError as error:
            self._crowded = self._crowded or error.errno == errno.EAGAIN
            if call is None or (call.started.done() and call.started.exception() is error):
                refused = NotStarted(str(error))
                refused.errno = error.errno
                raise refused from error
            raise
        finally:
            stdout, stderr = out.finish(), err.finish()
        return ExecResult(stdout, stderr, os.waitstatus_to_exitcode(status), timed_out, out.truncated or err.truncated)

    async def _stop(self, call: Call) -> int:
        """SIGKILL to the process group of a call, and its status."""
        await self._control.ask({"op": "kill", "target": call.number})
        try:
            async with asyncio.timeout(_KILL_S):
                return await asyncio.shield(call.done)
        except TimeoutError:
            raise SandboxError(f"a process of the sandbox did not end within {_KILL_S} s after SIGKILL") from None

    async def open_gate(self, host: str, port: int) -> str:
        """Let the sandbox reach one address of the host, at the URL that this returns; everything else stays unreachable."""
        if self._gate is not None:
            raise SandboxError("the gate of this sandbox is open already")
        _, descriptors = await self._control.ask({"op": "listen", "port": GATE_PORT})
        gate = Gate(socket.socket(fileno=descriptors[0]), host, port)
        await gate.open()
        self._gate = gate
        return f"http://127.0.0.1:{GATE_PORT}"

    async def close_gate(self) -> None:
        """End all egress, open connections too. Does nothing when no gate is open."""
        if self._gate is not None:
            gate, self._gate = self._gate, None
            await gate.close()

    async def fork_target(self) -> ForkTarget:
        """What `enter.fork_into` needs to place a forked process here. The caller closes it."""
        message, descriptors = await self._control.ask({"op": "namespaces"})
        namespaces = dict(zip(message["namespaces"], descriptors, strict=True))
        return ForkTarget(namespaces, self._cgroups, self.uid, self.uid, self._rlimits, self.spec.workdir)

    async def upload(self, source: Path, target: str, user: User = "agent") -> None:
        """Copy a host file to the path `target`, or a directory's content into the directory `target`; `user` owns the result."""
        data, directory = await asyncio.to_thread(archive.pack, source, target)
        request = {"op": "unpack", "path": directory, "cwd": "/", "user": user}
        result = await self._run(request, _TRANSFER_S, data, (0, 4096))
        if result.return_code != 0:
            raise SandboxError(f"cannot upload to {target}: {result.stderr.decode(errors='replace').strip() or result.return_code}")

    async def download(self, source: str, target: Path, max_bytes: int = 64 << 20, user: User = "agent", cut: bool = False) -> list[str]:
        """Copy the file `source` to the host path `target`, or a directory's content into the directory `target`.

        Only regular files and directories arrive; the names of all else (links that an agent planted) are returned. Raises SandboxError
        when `source` is missing or unreadable for `user`, or, without `cut`, larger than `max_bytes`. Works after `kill` too, except in
        the work directory.
        """
        dead = self._control.closed
        data = await (self._pack_dead("root", source, max_bytes, cut) if dead else self._pack(source, max_bytes, user, cut))
        return await asyncio.to_thread(archive.extract, data, target, cut)

    async def _pack(self, source: str, max_bytes: int, user: User, cut: bool) -> bytes:
        request = {"op": "pack", "path": source, "cwd": "/", "user": user}
        result = await self._run(request, _TRANSFER_S, None, (max_bytes, 4096), cut=True)
        if cut and result.stdout:
            return result.stdout
        if result.truncated:
            raise SandboxError(f"cannot download {source}: it is larger than {max_bytes} bytes")
        if result.return_code != 0:
            raise SandboxError(f"cannot download {source}: {result.stderr.decode(errors='replace').strip() or result.return_code}")
        return result.stdout

    async def _pack_dead(self, layer: str, source: str, max_bytes: int, cut: bool = False) -> bytes:
        out = Collector(max_bytes, cut=True)
        try:
            call = await self._spawner.call({"op": "pack", "sandbox": self._number, "layer": layer, "path": source}, (out.writer,))
        finally:
            out.started()
        try:
            async with asyncio.timeout(_TRANSFER_S):
                status = await call.done
                await out.ended
        except TimeoutError:  # what an agent can leave is bounded and takes far less: it is this machine
            raise SandboxLost(f"reading {source} took longer than {_TRANSFER_S} s") from None
        finally:
            data = out.finish()
        if cut and data:
            return data
        if out.truncated:
            raise SandboxError(f"{source} is larger than {max_bytes} bytes")
        if status != 0:
            code = os.waitstatus_to_exitcode(status)
            raise SandboxError(f"{source} cannot be read{f': {os.strerror(code)}' if 0 < code < UNKNOWN_ERROR else ''}")
        return data

    async def changes(self, max_bytes: int = 64 << 20) -> list[Change]:
        """How the work directory differs from the pristine tree. Call `kill` first for an answer that stays true.

        Raises SandboxError when the changed files have more than `max_bytes` together.
        """
        data = await self._pack_dead("upper", "/", max_bytes)
        return await asyncio.to_thread(archive.changes, data, self.spec.workspace)

    async def kind(self, path: str) -> Literal["file", "directory", "other", "missing"]:
        """What is at a path in the sandbox; links are followed there."""
        message, _ = await self._control.ask({"op": "stat", "path": path})
        mode = message["mode"]
        if mode is None:
            return "missing"
        return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"

    async def usage(self) -> UsageReport:
        message, _ = await self._spawner.ask({"op": "usage", "sandbox": self._number})
        report = UsageReport(**message["usage"])
        # Limits of the process count nothing, but we have seen that no process could be started.
        return dataclasses.replace(report, process_limit_hits=1) if self._crowded and not report.process_limit_hits else report

    async def kill(self) -> None:
        """SIGKILL to everything inside; on return no process of the sandbox exists. Its files stay for `changes` and `download`."""
        await self.close_gate()
        self._control.close()
        await self._spawner.ask({"op": "kill", "sandbox": self._number})

    async def destroy(self) -> None:
        """`kill`, and remove every trace. Does nothing when the spawner is gone, which took everything with it."""
        await self.close_gate()
        self._control.close()
        try:
            await self._spawner.ask({"op": "destroy", "sandbox": self._number})
        except SandboxLost:
            return
