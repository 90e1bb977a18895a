"""What runs in a pod for the host, one process per request: `python3 -I -S -B`, as root of the container, its text sent along.

For a command it is a watchdog over one process group: it feeds the command its input (the exec protocol knows no end of input, so lengths
are sent), bounds what it prints, kills it at its deadline, and says how it ended. So the end of a command is known even where a process
that it left behind holds its output open, a signal is told from an exit code, and a deadline holds whatever becomes of the connection.

In: length (8 bytes, big endian) and JSON request, then `input` bytes. Out: frames of kind (1 byte), length (4 bytes, big endian), data.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sandbox.environments.child import end_with, execute, set_limits, take

Request = dict[str, Any]
STDOUT, STDERR, END, BEAT = 1, 2, 3, 4
BEAT_S = 10
LOOK_S = 1
INPUT_S = 120
"""A host that does not send what it announced is gone."""
BLOCK = 1 << 16
_SECCOMP, _NO_NEW_PRIVS = 22, 38
"""Of prctl."""


def main(operations: dict[str, Any], transfer: str) -> None:
    """`operations` and `transfer` are the modules `operations.py` (its names) and `namespace/transfer.py` (its text)."""
    signal.alarm(INPUT_S)
    request = json.loads(exactly(int.from_bytes(exactly(8), "big")))
    signal.alarm(0)
    name = request["op"]
    if name == "exec":
        argv = request["argv"]
        if isinstance(argv, str):  # for a shell
            argv = ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", argv]
        Command(request, lambda: execute(argv, request["env"]), operations["cpu_used"]).run()
    elif name in operations["CHILDREN"]:
        tools: dict[str, Any] = {"__name__": "transfer"}
        exec(compile(transfer, "transfer.py", "exec"), tools)  # before the child changes its user: nothing is imported after that
        Command(request, lambda: operations["CHILDREN"][name](request, tools), operations["cpu_used"]).run()
    else:
        try:
            answer = operations["ANSWERS"][name](request, become)
        except OSError as error:
            answer = {"errno": error.errno, "error": f"{error.strerror}: {error.filename or ''}"}
        frame(END, json.dumps(answer).encode())


def exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        block = os.read(0, count - len(data))
        if not block:
            os._exit(3)
        data += block
    return data


def frame(kind: int, data: bytes) -> None:
    view = memoryview(struct.pack(">BI", kind, len(data)) + data)
    while view:
        view = view[os.write(1, view) :]


class Command:
    """A child that does `body`, and this process, which watches it.

    `limits` of the request bounds the two outputs, in bytes; with `cut` the child is ended at the limit, without it goes on unheard.
    """

    def __init__(self, request: Request, body: Callable[[], None], cpu_used: Callable[[], float]) -> None:
        self.request, self.body, self.cpu_used = request, body, cpu_used
        self.child = 0
        self.input_left: int = request.get("input", 0)
        self.room: dict[int, int] = {STDOUT: request["limits"][0], STDERR: request["limits"][1]}
        self.outputs: dict[int, int] = {}
        self.feed: int | None = None
        self.pending = b""
        self.timed_out = self.truncated = self.stopped = self.out_of_cpu = False

    def run(self) -> None:
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        source, self.feed = os.pipe()
        readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
        self.outputs = dict(zip(readers, (STDOUT, STDERR), strict=True))
        failures, failing = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            self.become_child(source, *writers, failing)
        for fd in (source, failing, *writers):
            os.close(fd)
        os.set_blocking(self.feed, False)
        if self.input_left == 0:
            self.end_input()
        path = f"{self.request['state']}/{self.request['id']}"
        os.makedirs(self.request["state"], mode=0o700, exist_ok=True)
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        try:
            status = self.watch(woken)
        finally:
            os.unlink(path)
        end = {name: getattr(self, name) for name in ("timed_out", "truncated", "stopped", "out_of_cpu")} | {"status": status}
        os.set_blocking(failures, False)
        try:
            end |= json.loads(os.read(failures, 4096) or b"{}")
        except BlockingIOError:
            pass
        frame(END, json.dumps(end).encode())

    def become_child(self, *fds: int) -> NoReturn:
        """The last descriptor hears why a command could not be started at all; a command itself does not get it."""

        def begin() -> None:
            take(fds)
            become(self.request)
            self.body()

        def refused(error: OSError) -> None:
            if error.errno == errno.EAGAIN:
                why = f"the sandbox is at its limit of processes: {error.strerror}"
                os.write(3, json.dumps({"errno": error.errno, "error": why}).encode())

        end_with(begin, refused)

    def watch(self, woken: int) -> int:
        """Until the child is gone; its wait status. What the child's children hold open afterwards does not count."""
        seconds = self.request.get("timeout_s")
        end = None if seconds is None else time.monotonic() + seconds
        beat, look = time.monotonic() + BEAT_S, time.monotonic() + LOOK_S
        while True:
            now = time.monotonic()
            if end is not None and now >= end:
                self.timed_out, end = True, None
                self.kill()
            if now >= beat:
                frame(BEAT, b"")
                beat = now + BEAT_S
            if now >= look:
                self.out_of_cpu = self.out_of_cpu or self.over_cpu()
                look = now + LOOK_S
            for fd in self.ready(woken, min(beat, look, end if end is not None else beat) - now):
                if fd == woken:
                    os.read(woken, 4096)
                elif fd == 0:
                    self.take_input()
                elif fd == self.feed:
                    self.give_input()
                else:
                    self.take_output(fd)
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                # Another watchdog may have ended the whole just now, and all of it may have ended before anybody looked.
                self.out_of_cpu = self.out_of_cpu or self.over_cpu()
                self.drain()
                return status

    def ready(self, woken: int, seconds: float) -> list[int]:
        poll = select.poll()
        for fd in (woken, *self.outputs):
            poll.register(fd, select.POLLIN)
        if self.input_left and not self.pending:
            poll.register(0, select.POLLIN)
        if self.pending and self.feed is not None:
            poll.register(self.feed, select.POLLOUT)
        return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]

    def take_input(self) -> None:
        block = os.read(0, min(BLOCK, self.input_left))
        self.input_left -= len(block)
        if not block:  # the host is gone, and with it whoever wants the answer
            self.input_left = 0
            self.kill()
        elif self.feed is not None:
            self.pending = block

    def give_input(self) -> None:
        assert self.feed is not None
        try:
            self.pending = self.pending[os.write(self.feed, self.pending) :]
        except BlockingIOError:
            return
        except OSError:  # the command reads no more; the rest is taken and thrown away
            self.pending = b""
            self.end_input()
            return
        if not self.pending and not self.input_left:
            self.end_input()

    def end_input(self) -> None:
        if self.feed is not None:
            os.close(self.feed)
            self.feed = None

    def take_output(self, fd: int) -> None:
        block = os.read(fd, BLOCK)
        if not block:
            del self.outputs[fd]
            os.close(fd)
            return
        kind = self.outputs[fd]
        kept = block[: self.room[kind]]
        self.room[kind] -= len(kept)
        if kept:
            frame(kind, kept)
        if len(kept) < len(block):
            self.truncated = True
            if self.request.get("cut"):
                self.kill()

    def drain(self) -> None:
        """What is in the pipes now; a process that was left behind may go on writing, so no more than a pipe holds."""
        for fd in list(self.outputs):
            os.set_blocking(fd, False)
            for _ in range(32):
                try:
                    self.take_output(fd)
                except BlockingIOError:
                    break
                if fd not in self.outputs:
                    break

    def over_cpu(self) -> bool:
        """Whether the sandbox as a whole has used the CPU that it may; then everything in it ends."""
        if self.request.get("cpu_s") is None or self.cpu_used() <= self.request["cpu_s"]:
            return False
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return True

    def kill(self) -> None:
        try:
            os.killpg(self.child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def stop(self, *_: object) -> None:
        self.stopped = True
        self.kill()


def become(request: Request) -> None:
    """The user of the request, for good. `agent` has no privilege and can gain none: the container forbids it."""
    with open("/proc/self/oom_score_adj", "w") as file:  # the kernel shall take any command before its watchdog, a grader too
        file.write("1000")
    set_limits(request.get("rlimits", {}))
    uid = request["uid"]
    if uid:
        install = system_call_filter(request["seccomp"]) if "seccomp" in request else None
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # The kernel counts a process that changes its user without asking; a sandbox that has no room for another one says so here.
        probe = os.fork()
        if probe == 0:
            os._exit(0)
        os.waitpid(probe, 0)
        if install is not None:
            install()
    os.chdir(request["cwd"])


def system_call_filter(program: str) -> Callable[[], None]:
    """What installs a seccomp program (hexadecimal, 8 bytes an instruction) for good; prepared as root, before anything else can be read.

    A container runtime has a filter of its own, but what that one lets through depends on its age.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(bytes.fromhex(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 16, ctypes.addressof(code)))

    def install() -> None:
        if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SECCOMP, 2, ctypes.byref(header), 0, 0):
            raise OSError(ctypes.get_errno(), "the filter of system calls cannot be installed", str(len(code)))

    return install
