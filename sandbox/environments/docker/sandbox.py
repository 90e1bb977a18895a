"""A running container: start processes, move files, open and close the gate, kill, collect, destroy."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sandbox.environments import archive
from sandbox.environments.archive import Change
from sandbox.environments.errors import NotStarted, SandboxError, SandboxLost
from sandbox.environments.namespace import transfer
from sandbox.environments.spec import DEFAULT_ENV, ExecResult, SandboxSpec, UsageReport, User
from sandbox.environments.streamed import launch
from sandbox.environments.streamed.tunnel import Tunnel
from sandbox.environments.streamed.tunnel import command as tunnel_command

from . import collect
from .container import AGENT, rlimits
from .engine import Engine, EngineLost
from .images import Prepared

log = logging.getLogger(__name__)

_TRANSFER_S = 120
_KILLED, _SIGKILL = 137, 9
_SETTLES_S = 0.3
_USERS: dict[User, str] = {"agent": f"{AGENT}:{AGENT}", "root": "0:0"}
_PACK = "\nimport sys\npack(sys.argv[1], sys.stdout.buffer)\n"
_UNPACK = "\nimport sys\nunpack(sys.argv[1], sys.stdin.buffer)\n"
_KIND = "import os, stat, sys; m = os.stat(sys.argv[1]).st_mode; print(1 if stat.S_ISDIR(m) else 2 if stat.S_ISREG(m) else 3)"


@dataclass
class Marks:
    """What `watch` saw of a container, and what we met."""

    killed: bool = False
    """By us: nothing is to be started in it any more."""
    disk_full: bool = False
    cpu_exceeded: bool = False
    disk_used: int = 0
    out_of_memory: int = 0
    crowded: bool = False

    @property
    def over(self) -> bool:
        """We ended it, or are about to."""
        return self.killed or self.disk_full or self.cpu_exceeded


class DockerSandbox:
    """See `backend.Sandbox`. `python` is a Python in the container that no agent can have changed."""

    uid = AGENT

    def __init__(self, engine: Engine, container: str, spec: SandboxSpec, python: str, prepared: Prepared) -> None:
        self.spec = spec
        self.container = container
        self.marks = Marks()
        self._engine = engine
        self._python = python
        self._shell = prepared.shell
        given = prepared.env
        self._env = given | {name: value for name, value in DEFAULT_ENV.items() if name != "PATH" or name not in given}
        self._tunnel: Tunnel | None = None
        self._usage: UsageReport | None = None
        self._destroyed = False

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
        argv = [self._shell, "-c", command] if isinstance(command, str) else list(command)
        limit = max_output if max_output is not None else self.spec.limits.output_kb << 10
        return await self._run(argv, user, {**self._env, **(env or {})}, cwd or self.spec.workdir, timeout_s, stdin or b"", (limit, limit))

    async def _run(
        self,
        argv: list[str],
        user: User,
        env: Mapping[str, str],
        cwd: str,
        timeout_s: float | None,
        stdin: bytes,
        limits: tuple[int, int],
        cut: bool = False,
    ) -> ExecResult:
        if self.marks.killed:
            raise SandboxLost("the container was killed")
        request = launch.order(
            argv, env=env, cwd=cwd, rlimits=rlimits(self.spec), stdin=len(stdin), timeout_s=timeout_s, limits=limits, cut=cut
        )
        try:
            number, stream = await self._engine.exec(self.container, launch.command(self._python), _USERS[user])
        except SandboxLost:
            raise
        except SandboxError as error:
            raise NotStarted(str(error)) if await self._runs() else SandboxLost(str(error)) from error
        ran = launch.Ran()
        try:
            await launch.run(stream, request, stdin, timeout_s, limits, ran)
        except SandboxLost:
            pass  # what became of it is asked below
        finally:
            # Its end of the stream tells a program that goes on (we were cancelled) to stop.
            await asyncio.shield(stream.close())
        end = ran.ended or await self._unheard(number, ran, stream.errors)
        if _exit_code(end.status) == -_SIGKILL and self.marks.over and not end.timed_out:
            raise _lost(ran)  # with everything else, and the program that started it was a little later
        stdout, stderr = bytes(ran.stdout), bytes(ran.stderr)
        return ExecResult(stdout, stderr, _exit_code(end.status), end.timed_out, end.truncated)

    async def _unheard(self, number: str, ran: launch.Ran, errors: bytes) -> launch.End:
        """The program that starts commands ended without a word: whose doing was it? Agents can kill it, where it runs as they do."""
        found = await self._engine.call(self._engine.api.exec_inspect, number)
        if found.get("ExitCode") == _KILLED:
            await asyncio.sleep(_SETTLES_S)  # with the whole container, perhaps: its state is told a little later
        if self.marks.killed or not await self._runs():
            raise _lost(ran)
        code = found.get("ExitCode")
        words = (errors or ran.noise).decode(errors="replace").strip()[-300:]
        if found.get("Running") or code is None:
            raise SandboxError(f"the engine lost a command: it does not know how it ended {words}")
        if code <= 128:
            # Words of the engine's runtime, or of our own program: an agent that gets there and writes them accuses itself.
            self.marks.crowded = self.marks.crowded or "temporarily unavailable" in words
            raise NotStarted(f"a command could not be started in the container (exit {code}): {words or 'it said nothing'}")
        return launch.End(code - 128, False, False)

    async def _runs(self) -> bool:
        return bool((await self._engine.call(collect.state, self._engine.api, self.container)).get("Running"))

    async def open_gate(self, host: str, port: int) -> str:
        if self._tunnel is not None:
            raise SandboxError("the gate of this sandbox is open already")
        _, stream = await self._engine.exec(self.container, tunnel_command(self._python), _USERS["root"])
        tunnel = self._tunnel = Tunnel(stream, host, port)
        try:
            return await tunnel.open()
        except SandboxError:
            self._tunnel = None
            raise

    async def close_gate(self) -> None:
        if self._tunnel is not None:
            tunnel, self._tunnel = self._tunnel, None
            await tunnel.close()

    # ---------------------------------------------------------------- files

    async def upload(self, source: Path, target: str, user: User = "agent") -> None:
        """The archive is unpacked in the container, by the user that is to own it: links there lead nowhere else."""
        data, directory = await asyncio.to_thread(archive.pack, source, target)
        result = await self._trusted(_UNPACK, directory, user, data, (0, 4096))
        if result.return_code != 0:
            raise SandboxError(f"cannot upload to {target}: {_words(result)}")

    async def download(self, source: str, target: Path, max_bytes: int = 64 << 20, user: User = "agent", cut: bool = False) -> list[str]:
        data = None if user == "root" else await self._packed(source, max_bytes, user, cut)
        if data is None:  # no root of a container may read everything; the engine may, and of one that ended too
            data = await self._engine.call(collect.packed, self._engine.api, self.container, source, max_bytes, cut)
        return await asyncio.to_thread(archive.extract, data, target, cut)

    async def _packed(self, source: str, max_bytes: int, user: User, cut: bool) -> bytes | None:
        """As `user` may read it; None when nothing runs in the container any more."""
        try:
            result = await self._trusted(_PACK, source, user, b"", (max_bytes, 4096), cut=True)
        except SandboxLost:
            return None
        if cut and result.stdout:
            return result.stdout
        if result.truncated:
            raise SandboxError(f"cannot download {source}: it is larger than {max_bytes} bytes")
        if result.return_code != 0:
            raise SandboxError(f"cannot download {source}: {_words(result)}")
        return result.stdout

    async def _trusted(self, call: str, path: str, user: User, stdin: bytes, limits: tuple[int, int], cut: bool = False) -> ExecResult:
        """`call` behind the text of `namespace.transfer`, with `path` as its argument."""
        program = await asyncio.to_thread(Path(transfer.__file__).read_text, encoding="utf-8")
        argv = [self._python, "-I", "-S", "-B", "-c", program + call, path]
        return await self._run(argv, user, DEFAULT_ENV, "/", _TRANSFER_S, stdin, limits, cut)

    async def changes(self, max_bytes: int = 64 << 20) -> list[Change]:
        wanted = self.spec.workdir, self.spec.workspace, max_bytes, self.marks.disk_full
        return await self._engine.call(collect.changes, self._engine.api, self.container, *wanted)

    async def kind(self, path: str) -> Literal["file", "directory", "other", "missing"]:
        result = await self._run([self._python, "-I", "-S", "-B", "-c", _KIND, path], "root", DEFAULT_ENV, "/", 30, b"", (8, 4096))
        kinds: dict[bytes, Literal["file", "directory", "other"]] = {b"1": "directory", b"2": "file", b"3": "other"}
        return kinds.get(result.stdout.strip(), "missing")

    # ---------------------------------------------------------------- end

    async def usage(self) -> UsageReport:
        """Counted by the container's own cgroup until `kill`."""
        if self._usage is None:
            counted, running = await self._counters(), await self._seen()
            return self._report(counted, running)
        return replace(self._usage, running=False)

    async def _seen(self) -> bool:
        """Look at disk and end as `watch` does, but now: whoever asks must not have to wait for its turn. Whether the container runs."""
        state, used = await self._engine.call(collect.ended, self._engine.api, self.container)
        marks = self.marks
        marks.disk_used = max(marks.disk_used, used)
        # A quota refuses the block that does not fit: within a hundredth is full.
        marks.disk_full = marks.disk_full or used * 100 >= (self.spec.limits.disk_mb << 20) * 99
        marks.out_of_memory = max(marks.out_of_memory, int(bool(state.get("OOMKilled"))))
        return bool(state.get("Running"))

    def _report(self, found: dict[str, int], running: bool) -> UsageReport:
        marks = self.marks
        return UsageReport(
            running=running,
            cpu_s=found.get("cpu_ns", 0) / 1e9,
            # Counted at the end, so that it does not matter whether somebody looked in time.
            cpu_exceeded=marks.cpu_exceeded or found.get("cpu_ns", 0) > self.spec.limits.cpu_s * 1_000_000_000,
            memory_peak=found.get("memory_peak", 0),
            out_of_memory=max(found.get("oom_kill", 0), marks.out_of_memory),
            process_limit_hits=found.get("pids_hits", 0) or int(marks.crowded),
            disk_used=marks.disk_used,
            disk_full=marks.disk_full,
        )

    async def _counters(self) -> dict[str, int]:
        """Empty where nothing can be started any more: then `watch` is all we know from."""
        argv = [self._python, "-I", "-S", "-B", "-c", collect.COUNTERS]
        try:
            result = await self._run(argv, "root", DEFAULT_ENV, "/", 10, b"", (4096, 4096))
            found: dict[str, int] = json.loads(result.stdout)
        except (SandboxError, ValueError):
            return {}
        return found

    async def kill(self) -> None:
        if self.marks.killed:
            return
        counted = await self._counters()
        self.marks.killed = True
        await self.close_gate()
        await self._engine.call(collect.kill, self._engine.api, self.container)
        await self._seen()
        self._usage = self._report(counted, running=False)

    async def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = self.marks.killed = True
        await self.close_gate()
        try:
            await self._engine.call(collect.remove, self._engine.api, self.container)
        except EngineLost as error:
            log.warning("container %s stays until it is swept: %s", self.container[:12], error)


def _lost(ran: launch.Ran) -> SandboxLost:
    lost = SandboxLost("the container is not running any more")
    lost.stdout = bytes(ran.stdout)
    return lost


def _exit_code(status: int) -> int:
    signal = status & 0x7F
    return -signal if signal else status >> 8


def _words(result: ExecResult) -> str:
    return result.stderr.decode(errors="replace").strip()[-500:] or str(result.return_code)
