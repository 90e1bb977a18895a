"""A running pod as a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from sandbox.environments import archive
from sandbox.environments.archive import Change
from sandbox.environments.errors import NotStarted, SandboxError, SandboxLost
from sandbox.environments.namespace.seccomp import PROGRAM
from sandbox.environments.spec import DEFAULT_ENV, OPEN_FILES, UNWATCHED_CPU_S, ExecResult, SandboxSpec, UsageReport, User

from . import gates, stream
from .api import Absent, ApiError, Busy, Object
from .pods import Blame, End, ended
from .pristine import Manifest
from .stream import Answer, LostStatus

if TYPE_CHECKING:
    from .cluster import Cluster

log = logging.getLogger(__name__)

STATE = "/var/lib/lego"
"""Where root of a pod notes which process watches over which command."""
_GRACE_S = 20
"""From the deadline of a command to the point where nobody can be expected to answer any more."""
_ASK_S = 60
_TRANSFER_S = 300
_KILL_TRIES = 3
_NEWS_S = 3
_PATIENCE_S, _PAUSE_S = 20, 0.5
"""An API server or a kubelet that is restarted comes back."""
_GONE_S = 60
_CHUNKS = 4096


class PodSandbox:
    """Made by `Cluster.create`. After `kill` only `usage`, `changes`, `download`, `kill` and `destroy` work."""

    def __init__(self, cluster: Cluster, name: str, uid: int, spec: SandboxSpec) -> None:
        self._cluster = cluster
        self._numbers = itertools.count()
        self._gate: gates.PodGate | None = None
        self._crowded = self._starved = False
        self._killed = False
        self._full = ""
        """Why what is left of the agent keeps even our own programs from running."""
        self._destroyed = False
        self._counted: dict[str, Any] = {}
        """What the last look inside counted, for when there is nothing to look at any more."""
        self.pristine: Manifest = {}
        self.left_out: list[str] = []
        """What lies in the work directory by our own doing."""
        self.name = name
        self.uid = uid
        self.spec = spec

    # ---------------------------------------------------------------- commands

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
        """See `backend.Sandbox`. Raises SandboxLost when the pod is gone, SandboxError when nobody said how the command ended."""
        limit = max_output if max_output is not None else self.spec.limits.output_kb << 10
        argv = command if isinstance(command, str) else list(command)
        # The limits are root's too: a grader is root, and what it grades becomes the agent.
        request = {"op": "exec", "argv": argv, "env": {**DEFAULT_ENV, **(env or {})}, "limits": [limit, limit], "rlimits": self._rlimits()}
        return self._result(await self._command(request, user, timeout_s, stdin or b"", cwd or self.spec.workdir))

    async def _command(self, request: Object, user: User, timeout_s: float | None, data: bytes, cwd: str = "/") -> Answer:
        number = f"{next(self._numbers)}"
        identity: Object = {"uid": 0}
        if user == "agent":
            identity = {"uid": self.uid, "rlimits": self._rlimits(), "seccomp": PROGRAM.hex()}
        if not self._killed:
            identity |= {"cpu_s": self.spec.limits.cpu_s}
        whole = {**request, **identity, "id": number, "state": STATE, "cwd": cwd, "timeout_s": timeout_s}
        try:
            answer = await self._ask(whole, data, None if timeout_s is None else timeout_s + _GRACE_S)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):  # a pod that is gone has no process to stop
                await self._ask({"op": "stop", "target": number, "state": STATE}, seconds=_ASK_S)
            raise
        if answer.end and answer.end["out_of_cpu"]:
            self._killed = True
            raise SandboxLost(f"the sandbox used more CPU than its {self.spec.limits.cpu_s} s; everything in it was ended")
        return answer

    def _rlimits(self) -> dict[str, int]:
        limits = self.spec.limits
        return {
            "CORE": 0,
            "CPU": limits.cpu_s + UNWATCHED_CPU_S,
            "FSIZE": limits.disk_mb << 20,
            "NOFILE": OPEN_FILES,
            "NPROC": limits.processes,
        }

    async def _ask(self, request: Mapping[str, Any], data: bytes = b"", seconds: float | None = _ASK_S) -> Answer:
        if self._killed and request["op"] not in ("collect", "pack", "kill", "usage"):
            raise SandboxLost(f"the sandbox of {self.spec.name or self.name} was killed")
        if end := self._end():
            raise _lost(f"the pod is gone: {end.words}", outside=end.blame is Blame.CLUSTER)
        if len(json.dumps(request)) > _MAX_REQUEST:
            raise NotStarted(f"a command of more than {_MAX_REQUEST} bytes cannot be started: upload large input as a file")
        after_kill, patience = self._killed, time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await stream.ask(self._cluster.api, self.name, self._cluster.python, request, data, seconds)
            except (LostStatus, ApiError) as lost:
                # Nothing was begun where the way in was busy, or led to a kubelet that has not heard of its pods since it started.
                begun = not isinstance(lost, (Busy, Absent))
                if begun or self._end() or self._killed > after_kill or time.monotonic() > patience:
                    raise await self._what_happened(lost, after_kill) from lost
                await asyncio.sleep(_PAUSE_S)
            except SandboxError as error:
                self._crowded = self._crowded or error.errno == errno.EAGAIN
                raise

    async def _what_happened(self, lost: LostStatus | ApiError, after_kill: bool) -> SandboxError:
        """A connection that ends early may be the first sign that the pod did: the cluster's own words come a little later."""
        end = self._end()
        if end is None and self._killed == after_kill:
            with contextlib.suppress(TimeoutError, SandboxLost):
                end = await self._cluster.pods.wait(self.name, lambda pod: _end_of(pod), _NEWS_S)
        stdout = lost.stdout if isinstance(lost, LostStatus) else b""
        if end:
            return _lost(f"the pod is gone: {end.words}", stdout, outside=end.blame is Blame.CLUSTER)
        if self._killed > after_kill:
            return _lost("the sandbox was killed", stdout)
        if isinstance(lost, LostStatus) and lost.killed:
            # Nobody in a pod may do that to root's processes: the kernel did. After `kill` nothing but files can have taken the memory.
            self._starved = True
            words = "our own program in the sandbox was ended for want of memory or CPU time"
            return SandboxError(words) if after_kill else _lost(words, stdout)
        return _lost(str(lost), stdout, outside=True) if after_kill else lost

    def _end(self) -> End | None:
        return _end_of(self._cluster.pods.latest(self.name))

    @staticmethod
    def _result(answer: Answer) -> ExecResult:
        assert answer.end is not None  # noqa: S101 -- `stream.ask` answers with nothing less
        code = os.waitstatus_to_exitcode(answer.end["status"])
        return ExecResult(bytes(answer.stdout), bytes(answer.stderr), code, answer.end["timed_out"], answer.end["truncated"])

    # ---------------------------------------------------------------- network

    async def open_gate(self, host: str, port: int) -> str:
        """See `backend.Sandbox`. Ready when the pod has been seen to reach it: clusters take their time over a policy."""
        if self._gate is not None:
            raise SandboxError("the gate of this sandbox is open already")
        self._gate = await gates.PodGate.open(self._cluster, self.name, host, port)
        address, port = self._gate.address, self._gate.port
        if not (await self.reaches([(address, port)], self._cluster.settings.start_s, patient=True))[0]:
            await self.close_gate()
            raise SandboxError(
                f"pod {self.name} does not reach the runner at {address}:{port}: set sandbox.kubernetes.runner_address to an "
                "address of this machine that pods can reach"
            )
        return self._gate.url

    async def close_gate(self) -> None:
        if self._gate is not None:
            gate, self._gate = self._gate, None
            await gate.close()

    async def reaches(self, targets: Sequence[tuple[str, int]], seconds: float, patient: bool = False) -> list[bool]:
        """Which of the targets (address, port) take a connection from inside, at once or (`patient`) within `seconds`."""
        request = {"op": "connect", "targets": [(*target, seconds, patient) for target in targets]}
        answer = await self._ask(request, seconds=seconds + _ASK_S)
        assert answer.end is not None  # noqa: S101 -- `stream.ask` answers with nothing less
        return cast(list[bool], answer.end["reached"])

    async def room(self, processes: int) -> int:
        """How many more processes may run, up to as many as asked for."""
        answer = await self._ask({"op": "crowd", "count": processes})
        assert answer.end is not None  # noqa: S101 -- see above
        return cast(int, answer.end["room"])

    async def resolves(self, names: Sequence[str]) -> list[str]:
        """Which of these names somebody answers for."""
        answer = await self._ask({"op": "resolve", "names": list(names)})
        assert answer.end is not None  # noqa: S101 -- see above
        return cast(list[str], answer.end["resolved"])

    # ---------------------------------------------------------------- files

    async def prepare(
        self, directories: Sequence[tuple[str, str, int]], passed: Sequence[str], closed: Sequence[tuple[str, int]]
    ) -> dict[str, Any]:
        """See `operations.prepare`; `passed` are directories on the way to what the agent is to reach."""
        request = {"op": "prepare", "agent": self.uid, "directories": directories, "passed": passed, "closed": closed}
        answer = await self._ask(request)
        return answer.end or {}

    async def upload(self, source: Path, target: str, user: User = "agent") -> None:
        data, directory = await asyncio.to_thread(archive.pack, source, target)
        await self.unpack(data, directory, user)

    async def unpack(self, data: bytes, directory: str, user: User) -> None:
        request = {"op": "unpack", "path": directory, "limits": [0, 4096]}
        result = self._result(await self._command(request, user, _TRANSFER_S, data))
        if result.return_code != 0:
            raise SandboxError(f"cannot upload to {directory}: {result.stderr.decode(errors='replace').strip() or result.return_code}")

    async def download(self, source: str, target: Path, max_bytes: int = 64 << 20, user: User = "agent", cut: bool = False) -> list[str]:
        data = await self.pack(source, max_bytes, "root" if self._killed else user, cut)
        return await asyncio.to_thread(archive.extract, data, target, cut)

    async def pack(self, source: str, max_bytes: int, user: User = "root", cut: bool = False) -> bytes:
        """A file or a directory's content as `transfer.pack` writes it."""
        return await self._output({"op": "pack", "path": source}, b"", f"download {source}", max_bytes, user, cut)

    async def _output(self, request: Object, data: bytes, what: str, max_bytes: int, user: User, cut: bool = False) -> bytes:
        whole = {**request, "limits": [max_bytes, _CHUNKS], "cut": True}
        result = self._result(await self._command(whole, user, _TRANSFER_S, data))
        if result.timed_out:  # what an agent can leave is bounded and takes far less: it is the node
            raise SandboxLost(f"cannot {what}: it took longer than {_TRANSFER_S} s")
        if cut and result.stdout:
            return result.stdout
        if result.truncated:
            raise SandboxError(f"cannot {what}: it is larger than {max_bytes} bytes")
        if result.return_code != 0:
            raise SandboxError(f"cannot {what}: {result.stderr.decode(errors='replace').strip() or result.return_code}")
        return result.stdout

    async def kind(self, path: str) -> Literal["file", "directory", "other", "missing"]:
        answer = await self._ask({"op": "kind", "path": path})
        return cast(Literal["file", "directory", "other", "missing"], (answer.end or {})["kind"])

    async def read_manifest(self) -> Manifest:
        """Of the work directory as it is now, which must be as the image has it."""
        data = await self._output({"op": "manifest", "path": self.spec.workdir}, b"", "list the work directory", 256 << 20, "root")
        return cast(Manifest, json.loads(data))

    async def changes(self, max_bytes: int = 64 << 20) -> list[Change]:
        """See `backend.Sandbox`. SandboxError when the agent's own doing ended the pod: there is nothing left to collect."""
        if self._full:
            raise SandboxError(f"nothing can be collected: {self._full}")
        if end := self._end():
            what = f"nothing can be collected, the pod is gone: {end.words}"
            raise SandboxError(what) if end.blame is Blame.AGENT else _lost(what, outside=True)
        request = {"op": "collect", "path": self.spec.workdir, "left_out": self.left_out}
        manifest = json.dumps(self.pristine).encode()
        data = await self._output(request, manifest, "collect the changed files together", max_bytes, "root")
        return await asyncio.to_thread(archive.changes, data, self.spec.workspace)

    # ---------------------------------------------------------------- end

    async def usage(self) -> UsageReport:
        end = self._end()
        if end is None and not self._destroyed:
            # What `kill` has counted already is worth more than a second look.
            with contextlib.suppress(SandboxError if self._killed else SandboxLost):
                answer = await self._ask({"op": "usage", **self._look()})
                self._counted = {**self._counted, **(answer.end or {})}
            end = self._end()
        counted, limits = self._counted, self.spec.limits
        cpu_s = float(counted.get("cpu_s", 0))
        cpu_exceeded = cpu_s > limits.cpu_s
        # One watchdog that finds too much CPU used ends all others too: that is no lack of memory.
        starved = self._starved and not cpu_exceeded
        return UsageReport(
            running=end is None and not self._killed,
            cpu_s=cpu_s,
            cpu_exceeded=cpu_exceeded,
            memory_peak=int(counted.get("memory_peak", 0)),
            out_of_memory=max(int(counted.get("out_of_memory", 0)), int(starved or (end is not None and end.out_of_memory))),
            process_limit_hits=max(int(counted.get("process_limit_hits", 0)), int(self._crowded or counted.get("at_process_limit", False))),
            disk_used=int(counted.get("disk_used", 0)),
            disk_full=(end is not None and end.disk_full) or bool(counted.get("disk_full")),
        )

    def _look(self) -> dict[str, Any]:
        """What `operations.usage` has to know."""
        return {
            "uid": self.uid,
            "rlimits": self._rlimits(),
            "cwd": "/",
            "path": self.spec.workdir,
            "disk": self.spec.limits.disk_mb << 20,
        }

    async def kill(self) -> None:
        """See `backend.Sandbox`. A pod that has ended has nothing left to kill; one that cannot be emptied is ended."""
        await self.close_gate()
        self._killed, full = True, ""
        for _ in range(_KILL_TRIES):
            try:
                answer = await self._ask({"op": "kill", **self._look()})
            except SandboxError as error:
                if self._end():
                    return
                full = "" if isinstance(error, SandboxLost) else str(error)
                log.warning("%s: killing what runs in it is tried again: %s", self.name, error)
                continue
            self._counted = answer.end or {}
            if not self._counted.get("left"):
                return
        try:
            await self._delete()
        except ApiError as error:
            raise SandboxLost(f"pod {self.name} could not be emptied of processes, and not be deleted: {error}") from error
        self._full = full
        if not full:
            raise SandboxLost(f"pod {self.name} could not be emptied of processes and was deleted")

    async def destroy(self) -> None:
        """See `backend.Sandbox`. Nothing of the agent runs when this returns; the cluster takes seconds over the rest, and on its own."""
        if self._destroyed:
            return
        self._destroyed = True
        if not self._killed:
            with contextlib.suppress(SandboxError):  # what cannot be killed is deleted all the same
                await self.kill()
        await self.close_gate()
        self._cluster.later(self.vanish())

    async def vanish(self) -> None:
        """Until the cluster has nothing of it left."""
        try:
            await self._delete()
        except SandboxError as error:
            log.warning("pod %s may be left until the end of the run: %s", self.name, error)
        finally:
            self._cluster.forget(self)

    async def _delete(self) -> None:
        """Return when the cluster says that the containers are gone; a node that does not answer is not waited for longer."""
        api, pods = self._cluster.api, self._cluster.pods
        if not await api.delete("pods", self.name):
            return
        try:
            await pods.wait(self.name, lambda pod: True if pod is None else None, _GONE_S)
        except TimeoutError:
            log.warning("pod %s is not gone after %s s; its node may be lost, it is removed from the cluster", self.name, _GONE_S)
            await api.delete("pods", self.name, grace_s=0)
        except (SandboxLost, ApiError):
            return


_MAX_REQUEST = 192 * 1024


def _lost(words: str, stdout: bytes = b"", *, outside: bool = False) -> SandboxLost:
    gone = SandboxLost(words)
    gone.stdout, gone.outside = stdout, outside
    return gone


def _end_of(pod: Object | None) -> End | None:
    """{} is a pod that has not been seen yet."""
    if pod is None:
        return End("it was deleted", Blame.CLUSTER)
    if (found := ended(pod)) is not None or "deletionTimestamp" not in pod.get("metadata", {}):
        return found
    return End("somebody deletes it", Blame.CLUSTER)
