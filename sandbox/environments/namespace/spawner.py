"""The process that makes sandboxes: small and single-threaded, so that a fork is cheap and holds nothing of the program that owns it.

It lives in a mount namespace of its own (rootless: also a user namespace), where the tmpfs of every sandbox is mounted. It answers JSON
packets on one socket and ends with its owner; every process 1 ends with it (PDEATHSIG), and so does everything in a sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cgroups, kernel, owner, rootfs, transfer
from .confine import ROOT_CAPABILITIES, Identity
from .inside import MAX_PACKET, Init

if TYPE_CHECKING:
    from .loopfs import Disks

UID_BASE = 61000
UNKNOWN_ERROR = 255
_TICK_S = 0.5
_END_S = 10


@dataclass
class _Sandbox:
    slot: int
    store: str
    pid: int
    group: cgroups.Group | None
    cpu_limit_s: float
    ready: int | None
    """Read end of the pipe on which process 1 says that it is ready."""
    created_by: int
    waiting: list[int] = field(default_factory=list)
    """Requests to answer when process 1 is gone."""
    destroy: bool = False
    cpu_exceeded: bool = False


class Spawner:
    def __init__(self, connection: socket.socket, state: str, rootless: bool, group: cgroups.Group | None, owner_process: int) -> None:
        self._connection = connection
        self._state = state
        self._mounts = f"{state}/mnt"
        self._rootless = rootless
        self._group = group
        self._owner_process = owner_process
        self._poll = select.poll()
        self._sandboxes: dict[int, _Sandbox] = {}
        self._jobs: dict[int, int] = {}  # pid → request
        self._maps: dict[tuple[int, int, int], int | None] = {}
        self._leftover: list[cgroups.Group] = []
        self._next_tick = 0.0
        self._disks: Disks | None = None
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._user_namespace = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC) if rootless else None

    def serve(self) -> None:
        """Until the owner closes the connection or is gone."""
        kernel.mount("tmpfs", self._mounts, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64m,mode=700")
        os.mkdir(f"{self._mounts}/etc")
        rootfs.build_etc(f"{self._mounts}/etc")
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poll.register(self._connection, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        self._poll.register(self._owner_process, select.POLLIN)
        while True:
            ready = [fd for fd, _ in self._poll.poll(_TICK_S * 1000 if self._sandboxes or self._leftover else None)]
            if woken in ready:
                os.read(woken, 4096)
            for fd in ready:
                if fd not in (woken, self._owner_process, self._connection.fileno()):
                    self._hear(fd)
            self._reap()
            self._tick()
            if self._owner_process in ready or (self._connection.fileno() in ready and not self._request()):
                break
        self._end()

    def _end(self) -> None:
        """Kill everything and remove every trace; what does not go in time stays recorded for the next sweep."""
        for sandbox in self._sandboxes.values():
            self._kill(sandbox)
        self._leftover += [sandbox.group for sandbox in self._sandboxes.values() if sandbox.group]
        self._leftover += [self._group] if self._group else []
        dying = {sandbox.pid for sandbox in self._sandboxes.values() if sandbox.pid} | self._jobs.keys()
        deadline = time.monotonic() + _END_S
        while (dying or self._leftover) and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                    dying.discard(pid)
            self._leftover = [group for group in self._leftover if not group.remove()]
            if dying or self._leftover:
                time.sleep(0.005)
        kernel.unmount(self._mounts)
        if not self._leftover:
            owner.remove(Path(self._state))

    # ---------------------------------------------------------------- requests

    def _request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._connection, MAX_PACKET, 4)
        if not data:
            return False
        message = json.loads(data)
        try:
            self._answer(message, fds)
        except (OSError, KeyError) as error:
            self._send({"id": message["id"], "error": str(error) if isinstance(error, OSError) else f"no such sandbox: {error}"})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["op"] == "create":
            self._create(message, fds)
            return
        sandbox = self._sandboxes[message["sandbox"]]
        match message["op"]:
            case "kill" | "destroy":
                sandbox.destroy = sandbox.destroy or message["op"] == "destroy"
                sandbox.waiting.append(message["id"])
                if sandbox.pid:
                    self._kill(sandbox)
                else:
                    self._gone(sandbox)
            case "usage":
                self._usage(message["id"], sandbox)
            case "pack":
                self._pack(message, sandbox, fds)

    def _create(self, message: dict[str, Any], fds: list[int]) -> None:
        slot = next(number for number in range(len(self._sandboxes) + 1) if number not in self._sandboxes)
        uid = UID_BASE if self._rootless else UID_BASE + slot
        agent = Identity(uid, uid)
        store = f"{self._mounts}/{slot}"
        megabytes = message["disk_mb"]
        group = None
        ready, announce = os.pipe2(os.O_CLOEXEC)
        os.mkdir(store)
        try:
            self._mount_store(store, megabytes, message["scratch"])
            os.mkdir(f"{store}/root")
            if self._group:
                group = self._group.child(str(slot))
                group.limit(message["memory_mb"] << 20, message["processes"] + 1)
            plan = rootfs.Plan(
                store=store,
                etc=f"{self._mounts}/etc",
                agent=agent,
                rootless=self._rootless,
                workdir=message["workdir"],
                workspace=message["workspace"],
                workspace_map=self._map(message["workspace"], uid),
                mounts=[(source, target) for source, target in message["mounts"]],
                directories=[(path, owner, mode) for path, owner, mode in message["directories"]],
                layers=message["layers"],
            )
            pid = self._fork_init()
            if pid == 0:
                self._become_init(plan, group, socket.socket(fileno=os.dup(fds[0])), announce, message["rlimits"])
        except OSError:
            os.close(ready)
            self._discard(store, group)
            raise
        finally:
            os.close(announce)
        self._sandboxes[slot] = _Sandbox(slot, store, pid, group, message["cpu_s"], ready, message["id"])
        self._poll.register(ready, select.POLLIN)

    def _mount_store(self, store: str, megabytes: int, scratch: str) -> None:
        if scratch == "memory":
            options = f"size={megabytes}m,nr_inodes={max(16384, 256 * megabytes)},mode=711"
            kernel.mount("tmpfs", store, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
            return
        if self._rootless:
            raise OSError(errno.EPERM, "sandbox.limits.scratch: disk needs root; use memory")
        from . import loopfs  # most spawners, and all that is forked from them, can do without

        self._disks = self._disks or loopfs.Disks(self._state)
        self._disks.mount(store, megabytes)

    def _fork_init(self) -> int:
        kernel.unshare(kernel.NEWPID)
        try:
            pid = os.fork()
        except OSError:
            kernel.setns(self._pid_namespace, kernel.NEWPID)
            raise
        if pid:
            kernel.setns(self._pid_namespace, kernel.NEWPID)
        return pid

    def _become_init(
        self, plan: rootfs.Plan, group: cgroups.Group | None, control: socket.socket, announce: int, limits: dict[str, int]
    ) -> None:
        """In the child, which is process 1 of the new process namespace. Does not return."""
        try:
            kernel.die_with_parent()
            signal.set_wakeup_fd(-1)
            keep = [control.fileno(), announce, *([self._user_namespace] if self._user_namespace is not None else [])]
            os.umask(0o022)
            _first_to_go()
            if group:
                group.join()
            kernel.unshare(kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWCGROUP)
            sys.meta_path.clear()
            sys.path.clear()
            kernel.loopback_up()
            socket.sethostname("sandbox")
            rootfs.build(plan)
            null = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            kernel.close_all_from(3, tuple(keep))
            self._confine_init(plan.agent)
            root = plan.agent if self._rootless else Identity(0, 0, ROOT_CAPABILITIES)
            init = Init(control, {"agent": plan.agent, "root": root}, limits, self._rootless, self._user_namespace)
            shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
            os.write(announce, json.dumps({"shell": shell}).encode())
            os.close(announce)
        except BaseException as error:  # noqa: BLE001 -- whatever went wrong must reach the owner, and this process must end
            os.write(announce, json.dumps({"error": str(error) or repr(error)}).encode())
            os._exit(1)
        init.serve()

    def _confine_init(self, agent: Identity) -> None:
        if self._rootless:
            # The agent's own user namespace: it counts the processes of this sandbox alone, and owns none of the other namespaces.
            kernel.unshare(kernel.NEWUSER)
            _write_map("/proc/self", f"{agent.uid} {agent.uid} 1", f"{agent.gid} {agent.gid} 1", deny_groups=False)
        else:
            os.setgroups([])
            kernel.drop_bounding_set(keep=ROOT_CAPABILITIES)
            kernel.set_capabilities(ROOT_CAPABILITIES | 1 << kernel.CAP_SETPCAP)
        kernel.no_new_privileges()
        kernel.hide_memory()
        kernel.die_with_parent()

    def _map(self, workspace: str | None, uid: int) -> int | None:
        """A user namespace that maps the owner of the pristine tree to the agent, kept for the next sandbox in this slot."""
        if workspace is None or self._rootless:
            return None
        status = os.stat(workspace)
        key = (status.st_uid, status.st_gid, uid)
        if key not in self._maps:
            self._maps[key] = _user_namespace(f"{status.st_uid} {uid} 1", f"{status.st_gid} {uid} 1")
        return self._maps[key]

    def _usage(self, request: int, sandbox: _Sandbox) -> None:
        usage = sandbox.group.usage() if sandbox.group else cgroups.Usage()
        disk = os.statvfs(sandbox.store)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        # A program that met the full disk may have removed some of its own files since: within a hundredth is full.
        full = disk.f_bavail * 100 < disk.f_blocks or disk.f_favail * 100 < disk.f_files
        exceeded = sandbox.cpu_exceeded or (sandbox.group is not None and usage.cpu_s > sandbox.cpu_limit_s)
        facts = asdict(usage) | {"cpu_exceeded": exceeded, "disk_used": used, "disk_full": full, "running": bool(sandbox.pid)}
        self._send({"id": request, "usage": facts})

    def _pack(self, message: dict[str, Any], sandbox: _Sandbox, fds: list[int]) -> None:
        """Stream what a sandbox wrote as tar: `layer` is `root`, or `upper` of the work directory. The child sees nothing but that.

        Its exit status is the number of the error that kept it from the end.
        """
        pid = os.fork()
        if pid:
            self._jobs[pid] = message["id"]
            return
        try:
            os.dup2(fds[0], 1)
            os.chroot(f"{sandbox.store}/{message['layer']}")
            os.chdir("/")
            kernel.close_all_from(3)
            kernel.drop_bounding_set()
            kernel.set_capabilities(1 << kernel.CAP_DAC_READ_SEARCH | 1 << kernel.CAP_SYS_ADMIN)  # the latter to read trusted.overlay.*
            kernel.no_new_privileges()
            with open(1, "wb", buffering=1 << 18) as output:
                transfer.pack(message["path"], output, overlay=message["layer"] == "upper")
        except OSError as error:
            os._exit(error.errno or UNKNOWN_ERROR)
        except BaseException:  # noqa: BLE001 -- the status tells the owner, and this child must end here
            os._exit(UNKNOWN_ERROR)
        os._exit(0)

    # ---------------------------------------------------------------- events

    def _hear(self, fd: int) -> None:
        """Process 1 is ready, or says why not, or ended without a word."""
        for sandbox in self._sandboxes.values():
            if sandbox.ready == fd:
                break
        else:
            return
        text = os.read(fd, 65536)
        self._poll.unregister(fd)
        os.close(fd)
        sandbox.ready = None
        message = json.loads(text) if text else {"error": "process 1 of the sandbox ended while it was being made"}
        if "error" in message:
            sandbox.destroy = True
            self._kill(sandbox)
            self._send({"id": sandbox.created_by, "error": message["error"]})
            return
        paths = list(sandbox.group.paths.values()) if sandbox.group else []
        uid = UID_BASE if self._rootless else UID_BASE + sandbox.slot
        facts = {"sandbox": sandbox.slot, "uid": uid, "cgroups": paths, "store": sandbox.store}
        self._send({"id": sandbox.created_by, **facts, "shell": message["shell"]})

    def _kill(self, sandbox: _Sandbox) -> None:
        """Process 1 first: with it alive a moment longer, it could tell of a command that we ended as of one that ended by itself."""
        if sandbox.pid:
            os.kill(sandbox.pid, signal.SIGKILL)
        if sandbox.group:
            sandbox.group.kill()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if request := self._jobs.pop(pid, None):
                self._send({"id": request, "status": status})
            for sandbox in [sandbox for sandbox in self._sandboxes.values() if sandbox.pid == pid]:
                sandbox.pid = 0
                if sandbox.ready is not None:
                    self._hear(sandbox.ready)
                self._gone(sandbox)

    def _gone(self, sandbox: _Sandbox) -> None:
        """Process 1 was reaped, so by the kernel's order everything in its process namespace is gone too."""
        if sandbox.destroy:
            del self._sandboxes[sandbox.slot]
            self._discard(sandbox.store, sandbox.group)
        for request in sandbox.waiting:
            self._send({"id": request})
        sandbox.waiting.clear()

    def _discard(self, store: str, group: cgroups.Group | None) -> None:
        with contextlib.suppress(OSError):  # it may not be mounted yet
            kernel.unmount(store)
        os.rmdir(store)
        if group and not group.remove():
            self._leftover.append(group)

    def _tick(self) -> None:
        if time.monotonic() < self._next_tick:
            return
        self._next_tick = time.monotonic() + _TICK_S
        self._leftover = [group for group in self._leftover if not group.remove()]
        for sandbox in self._sandboxes.values():
            if sandbox.pid and sandbox.group and not sandbox.cpu_exceeded and sandbox.group.cpu_s() > sandbox.cpu_limit_s:
                sandbox.cpu_exceeded = True
                self._kill(sandbox)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the owner may be gone; the loop ends at its next turn
            self._connection.send(json.dumps(message).encode())


def _first_to_go() -> None:
    """When the machine runs out of memory the kernel shall look in sandboxes first."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    try:
        os.write(fd, b"500")
    finally:
        os.close(fd)


def _user_namespace(uid_map: str, gid_map: str) -> int | None:
    """A descriptor of a new user namespace with these maps; None where the kernel refuses."""
    hold, release = os.pipe()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        try:
            kernel.unshare(kernel.NEWUSER)
        except OSError:
            os._exit(1)
        os.write(tell, b"x")
        os.read(hold, 1)
        os._exit(0)
    os.close(tell)
    try:
        if not os.read(told, 1):
            return None
        _write_map(f"/proc/{pid}", uid_map, gid_map, deny_groups=False)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (hold, release, told):
            os.close(fd)
        os.waitpid(pid, 0)


def _write_map(process: str, uid_map: str, gid_map: str, deny_groups: bool) -> None:
    texts = {"setgroups": "deny"} if deny_groups else {}
    for name, text in {**texts, "uid_map": uid_map, "gid_map": gid_map}.items():
        fd = os.open(f"{process}/{name}", os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _enter_user_namespace() -> None:
    """Continue as process 1 of a process namespace that an ordinary user owns: only such a one can be left and joined again."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID)
    _write_map("/proc/self", f"{UID_BASE} {uid} 1", f"{UID_BASE} {gid} 1", deny_groups=True)
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        return
    kernel.close_all_from(3)
    os.waitpid(pid, 0)
    os._exit(0)


def main(descriptor: int, state: str, rootless: bool, record: int) -> None:
    """Entry point of the spawner's process. `record` is the locked owner record of `state`: it stays locked while this process lives."""
    connection = socket.socket(fileno=descriptor)
    owner_process = os.pidfd_open(os.getppid())
    try:
        group = cgroups.find(os.path.basename(state))
        os.pwrite(record, json.dumps({"cgroups": group.paths if group else {}}).encode(), 0)
        if rootless:
            _enter_user_namespace()
        else:
            kernel.unshare(kernel.NEWNS)
        kernel.make_private("/")
        spawner = Spawner(connection, state, rootless, group, owner_process)
    except OSError as error:
        connection.send(json.dumps({"id": 0, "error": str(error)}).encode())
        return
    connection.send(json.dumps({"id": 0, "limits": "cgroup" if group else "rlimit"}).encode())
    try:
        spawner.serve()
    finally:
        if group:
            group.remove()  # gone already, unless something went wrong; a group in use stays for the next sweep
