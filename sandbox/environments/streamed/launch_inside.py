"""Runs one command in a sandbox for `launch.py`, as text behind that of `child.py`: `python3 -I -S -B -c TEXT`.

Standard input: 4 bytes length, an order in JSON, then the command's own input (`order["stdin"]` bytes). Its end before the command's is
the host's wish to stop. Standard output: messages of 1 byte kind, 4 bytes length and content: `o` and `e` are what the command printed,
at most `order["limits"]` bytes each; `x` is the end, as JSON. What comes out is bounded here, so that no flood travels.
"""

import json
import os
import select
import signal
import time
from typing import NoReturn

from sandbox.environments.child import end_with, execute, set_limits, take

BLOCK = 1 << 16
PENDING = 1 << 20


def exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        block = os.read(0, min(BLOCK, count - len(data)))
        if not block:
            os._exit(0)
        data += block
    return data


def become(order: dict, fds: list[int]) -> NoReturn:  # type: ignore[type-arg]
    take(fds)
    set_limits(order["rlimits"])
    os.chdir(order["cwd"])
    execute(order["argv"], order["env"])


class Output:
    """One stream of the command: passes on the first `limit` bytes and reads away the rest."""

    def __init__(self, kind: bytes, limit: int) -> None:
        self.fd, self.writer = os.pipe()
        os.set_blocking(self.fd, False)
        self.kind, self.left = kind, limit
        self.open, self.truncated = True, False

    def drain(self, pending: bytearray) -> None:
        while self.open and len(pending) < PENDING:
            try:
                block = os.read(self.fd, BLOCK)
            except BlockingIOError:
                return
            self.open = bool(block)
            self.truncated = self.truncated or len(block) > self.left
            block = block[: self.left]
            self.left -= len(block)
            if block:
                pending += message(self.kind, block)


def message(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(4, "big") + content


class Input:
    """The command's own input on its way from the host. A command that does not want it is not waited for."""

    def __init__(self, size: int) -> None:
        self.reader, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.coming, self.waiting, self.open = size, bytearray(), True

    def take(self) -> bool:
        """Read from the host; False when it went away. What comes behind the input is nothing to us."""
        block = os.read(0, BLOCK)
        if self.open:
            self.waiting += block[: self.coming]
        self.coming -= min(len(block), self.coming)
        return bool(block)

    def give(self) -> None:
        try:
            if self.waiting:
                del self.waiting[: os.write(self.fd, self.waiting)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.waiting.clear()
            self.open = self.close()
        if self.open and not self.waiting and not self.coming:
            self.open = self.close()

    def close(self) -> bool:
        os.close(self.fd)
        return False


def main() -> None:
    order = json.loads(exactly(int.from_bytes(exactly(4), "big")))
    source = Input(order["stdin"])
    outputs = [Output(b"o", order["limits"][0]), Output(b"e", order["limits"][1])]
    pid = os.fork()
    if pid == 0:
        end_with(lambda: become(order, [source.reader, *(output.writer for output in outputs)]))
    os.close(source.reader)
    for output in outputs:
        os.close(output.writer)
    source.give()
    os.set_blocking(1, False)
    status, timed_out = attend(pid, order, source, outputs)
    pending = bytearray()
    for output in outputs:  # what a process that ended has written is in the pipe now; its children do not count
        output.drain(pending)
        flush(pending)
    end = {"status": status, "timed_out": timed_out, "truncated": any(output.truncated for output in outputs)}
    pending += message(b"x", json.dumps(end).encode())
    flush(pending)


def attend(pid: int, order: dict, source: Input, outputs: list[Output]) -> tuple[int, bool]:  # type: ignore[type-arg]
    """Pass input and output on until the command ends; end it when its time is up, it said too much (`cut`), or the host went away."""
    ended = os.pidfd_open(pid)
    deadline = time.monotonic() + order["seconds"] if order["seconds"] is not None else None
    timed_out = False
    pending = bytearray()
    while True:
        ready = wait(ended, source, outputs, pending, None if deadline is None or timed_out else deadline - time.monotonic())
        if 0 in ready and not source.take():
            os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        if source.open:
            source.give()
        for output in outputs:
            output.drain(pending)
        if 1 in ready:
            del pending[: os.write(1, pending)]
        if ended in ready:
            status = os.waitpid(pid, 0)[1]
            flush(pending)
            return status, timed_out
        over = deadline is not None and not timed_out and time.monotonic() >= deadline
        if over or (order["cut"] and outputs[0].truncated):
            timed_out = timed_out or over
            os.killpg(pid, signal.SIGKILL)


def wait(ended: int, source: Input, outputs: list[Output], pending: bytearray, seconds: float | None) -> set[int]:
    """Descriptors that are ready. Nothing is read that there is no room for."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    if len(source.waiting) < PENDING:
        poll.register(0, select.POLLIN)
    if source.open and source.waiting:
        poll.register(source.fd, select.POLLOUT)
    if pending:
        poll.register(1, select.POLLOUT)
    for output in outputs:
        if output.open and len(pending) < PENDING:
            poll.register(output.fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else max(0, int(seconds * 1000) + 1))}


def flush(pending: bytearray) -> None:
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    poll.register(0, select.POLLIN)
    while pending:
        ready = {fd for fd, _ in poll.poll()}
        if 0 in ready and not os.read(0, BLOCK):
            os._exit(0)
        if 1 in ready:
            del pending[: os.write(1, pending)]


if __name__ == "__main__":
    main()
