"""Place a forked child of another process inside a sandbox: the primitive of a warm start.

A warm parent imports a harness once and then forks one process per rollout:

    target = ForkTarget.receive(connection)         # sent by the owner of the sandbox: `await sandbox.fork_target()`, `target.send(...)`
    pid = fork_into(target, stdio=(0, out, err), import_path=[...])
    if pid == 0:
        ...                                         # in the sandbox, as the agent; leave with os._exit
    target.close()

Rules for the parent: one thread only; it must reap its children at once (a sandbox is not gone before its last process is reaped);
objects that wrap descriptors which the child closes must stay referenced in the child, or their finalisers close other files.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from . import kernel
from .confine import Identity, become

# Joined in this order: a user namespace first, it gives the right to join what it owns; the mount namespace last, the old paths go with it.
_KINDS = {
    "user": kernel.NEWUSER,
    "pid": kernel.NEWPID,
    "net": kernel.NEWNET,
    "ipc": kernel.NEWIPC,
    "uts": kernel.NEWUTS,
    "cgroup": kernel.NEWCGROUP,
    "mnt": kernel.NEWNS,
}
NAMESPACES = tuple(_KINDS)


@dataclass(frozen=True)
class ForkTarget:
    """A running sandbox as `fork_into` needs it. Owns the descriptors in `namespaces` until `close`."""

    namespaces: dict[str, int]
    """Descriptor by kind; `user` and `agent_user` (the agent's own user namespace) exist in rootless mode only."""
    cgroups: tuple[str, ...]
    uid: int
    gid: int
    limits: dict[str, int]
    workdir: str

    def send(self, connection: socket.socket) -> None:
        """Hand a copy to the process at the other end of a unix socket (SOCK_SEQPACKET)."""
        names = list(self.namespaces)
        message = asdict(self) | {"namespaces": names}
        socket.send_fds(connection, [json.dumps(message).encode()], [self.namespaces[name] for name in names])

    @classmethod
    def receive(cls, connection: socket.socket) -> ForkTarget:
        """The counterpart of `send`; raises ConnectionError when the other end closed."""
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, 16)
        if not data:
            raise ConnectionError("the sender of a fork target closed the connection")
        message = json.loads(data)
        message["namespaces"] = dict(zip(message["namespaces"], descriptors, strict=True))
        message["cgroups"] = tuple(message["cgroups"])
        return cls(**{field.name: message[field.name] for field in fields(cls)})

    def close(self) -> None:
        for fd in self.namespaces.values():
            os.close(fd)


def fork_into(
    target: ForkTarget, stdio: tuple[int, int, int], import_path: Sequence[str] = (), keep: tuple[int, ...] = (), cwd: str | None = None
) -> int:
    """Fork; the child comes back with 0 inside the sandbox as the agent, the parent gets a pid to wait for.

    `stdio` become descriptors 0 to 2; all others but `keep` are closed in the child. Imports are impossible from before the child joins
    the mount namespace until it has dropped its privileges; then they come from `import_path` alone: name only directories that the
    sandbox mounts read-only at the same path. An OSError in the child ends it with status 126 and a line on its stderr; an OSError in
    the parent means that the sandbox is gone or at its process limit.
    """
    if "user" in target.namespaces:
        return _fork_rootless(target, stdio, import_path, keep, cwd)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.setns(target.namespaces["pid"], kernel.NEWPID)
        try:
            pid = os.fork()
        except OSError:
            kernel.setns(own, kernel.NEWPID)
            raise
        if pid:
            kernel.setns(own, kernel.NEWPID)
            return pid
    finally:
        os.close(own)
    _or_die(target, stdio, import_path, keep, cwd, joined=("pid",))
    return 0


def _fork_rootless(
    target: ForkTarget, stdio: tuple[int, int, int], import_path: Sequence[str], keep: tuple[int, ...], cwd: str | None
) -> int:
    """An ordinary user may join a process namespace only after the user namespace that owns it: an outer child waits for the inner one."""
    pid = os.fork()
    if pid:
        return pid
    kernel.die_with_parent()
    try:
        for path in target.cgroups:
            _join_cgroup(path)
        for kind in ("user", "pid"):
            kernel.setns(target.namespaces[kind], _KINDS[kind])
        inner = os.fork()
    except OSError as error:
        os.write(stdio[2], f"cannot enter the sandbox: {error}\n".encode())
        os._exit(126)
    if inner == 0:
        kernel.die_with_parent()
        _or_die(target, stdio, import_path, keep, cwd, joined=("user", "pid"))
        return 0
    kernel.close_all_from(0)
    code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _join_cgroup(path: str) -> None:
    fd = os.open(path + "/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def _or_die(
    target: ForkTarget,
    stdio: tuple[int, int, int],
    import_path: Sequence[str],
    keep: tuple[int, ...],
    cwd: str | None,
    joined: tuple[str, ...],
) -> None:
    try:
        _enter(target, stdio, import_path, keep, cwd, joined)
    except BaseException as error:  # noqa: BLE001 -- nothing of the parent's program may run in a child that is not all the way inside
        os.write(2, f"cannot enter the sandbox: {error}\n".encode())
        os._exit(126)


def _enter(
    target: ForkTarget,
    stdio: tuple[int, int, int],
    import_path: Sequence[str],
    keep: tuple[int, ...],
    cwd: str | None,
    joined: tuple[str, ...],
) -> None:
    os.setsid()
    if "user" not in joined:
        for path in target.cgroups:
            _join_cgroup(path)
    finders, sys.meta_path[:], sys.path[:] = list(sys.meta_path), [], []
    for kind in NAMESPACES:
        if kind in target.namespaces and kind not in joined:
            kernel.setns(target.namespaces[kind], _KINDS[kind])
    rootless = "agent_user" in target.namespaces
    if rootless:
        kernel.setns(target.namespaces["agent_user"], kernel.NEWUSER)
    for number, fd in enumerate([os.dup(fd) for fd in stdio]):
        os.dup2(fd, number)
    kernel.close_all_from(3, keep)
    become(Identity(target.uid, target.gid), target.limits, change_ids=not rootless)
    kernel.hide_memory()
    os.umask(0o022)
    os.chdir(cwd or target.workdir)
    sys.path_importer_cache.clear()
    sys.path[:] = list(import_path)
    sys.meta_path[:] = finders
