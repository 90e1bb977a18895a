"""Process 1 of a sandbox: reaps orphans and starts processes for the host, over one socket that only the host holds.

It already is in the cgroup and in all namespaces, so a new process costs one fork. It keeps the few capabilities that `root` in the
sandbox has and can start processes as `agent` or `root`; it imports nothing after the root directory has changed. In rootless mode it
has moved into a user namespace of its own, where it holds power over nothing but its own processes.

Requests are JSON packets `{"id", "op", ...}` with descriptors; answers `{"id", ...}`, and `{"id", "status"}` when a process ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from sandbox.environments import child

from . import transfer
from .confine import Identity, become
from .enter import NAMESPACES

MAX_PACKET = 192 * 1024


class Init:
    """`identities` by the names that requests use; `limits` are the resource limits of every process that starts."""

    def __init__(self, control: socket.socket, identities: dict[str, Identity], limits: dict[str, int], rootless: bool, outer: int | None):
        self._control = control
        self._identities = identities
        self._limits = limits
        self._rootless = rootless
        self._outer = outer
        self._running: dict[int, int] = {}  # pid → request

    def serve(self) -> NoReturn:
        """Until the host closes the socket; then process 1 ends and the kernel kills all others."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)  # process 1 is immune to signals without a handler
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if woken in ready:
                os.read(woken, 4096)
            self._reap()
            if self._control.fileno() in ready and not self._request():
                os._exit(0)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if request := self._running.pop(pid, None):
                self._send({"id": request, "status": status})

    def _request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, 4)
        if not data:
            return False
        message = json.loads(data)
        try:
            self._answer(message, fds)
        except OSError as error:
            self._send({"id": message["id"], "errno": error.errno, "error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        match message["op"]:
            case "exec":
                self._start(message, fds, lambda: child.execute(message["argv"], message["env"]))
            case "pack":
                self._start(message, fds, lambda: _pack(message["path"]))
            case "unpack":
                self._start(message, fds, lambda: _unpack(message["path"]))
            case "kill":
                for pid in [pid for pid, request in self._running.items() if request == message["target"]]:
                    os.killpg(pid, signal.SIGKILL)
                self._send({"id": message["id"]})
            case "listen":
                with socket.socket() as listener:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind(("127.0.0.1", message["port"]))
                    listener.listen(128)
                    self._send({"id": message["id"]}, [listener.fileno()])
            case "stat":
                self._send({"id": message["id"], "mode": _mode(message["path"])})
            case "namespaces":
                self._namespaces(message["id"])

    def _start(self, message: dict[str, Any], fds: list[int], body: Callable[[], None]) -> None:
        pid = os.fork()
        if pid:
            self._running[pid] = message["id"]
            self._send({"id": message["id"], "pid": pid})
            return
        child.end_with(lambda: self._become(message, fds, body))

    def _become(self, message: dict[str, Any], fds: list[int], body: Callable[[], None]) -> None:
        child.take(fds)
        become(self._identities[message["user"]], self._limits, change_ids=not self._rootless)
        os.chdir(message["cwd"])
        body()

    def _namespaces(self, request: int) -> None:
        fds = {}
        try:
            for kind in NAMESPACES:
                if kind != "user":
                    fds[kind] = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            if self._outer is not None:
                fds["agent_user"] = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            extra = [] if self._outer is None else [("user", self._outer)]
            names = [*fds.items(), *extra]
            self._send({"id": request, "namespaces": [name for name, _ in names]}, [fd for _, fd in names])
        finally:
            for fd in fds.values():
                os.close(fd)

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])
        except OSError:
            os._exit(0)  # the host is gone


def _mode(path: str) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError:
        return None


def _pack(path: str) -> None:
    with open(1, "wb", buffering=1 << 18) as output:
        transfer.pack(path, output)


def _unpack(path: str) -> None:
    with open(0, "rb", buffering=1 << 18) as source:
        transfer.unpack(path, source)
