"""Reading what a process prints, without a thread and without trusting how much it prints."""

from __future__ import annotations

import asyncio
import os


class Collector:
    """Keeps the first `limit` bytes that arrive on a pipe and reads away the rest, so that the writer never blocks on us.

    With `cut` the pipe closes at the limit instead: the writer is ours and shall stop.
    """

    def __init__(self, limit: int, cut: bool = False) -> None:
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._limit = limit
        self._kept = bytearray()
        self._open = True
        self.truncated = False
        self.ended = self._loop.create_future()
        """Resolves when the last writer closed, or at `finish`."""
        self._loop.add_reader(self._read, self._drain)

    @property
    def writer(self) -> int:
        """The end for the process; closed here by `started`."""
        return self._write

    def started(self) -> None:
        os.close(self._write)

    def _drain(self) -> None:
        while self._open:
            try:
                block = os.read(self._read, 1 << 18)
            except BlockingIOError:
                return
            if not block:
                self._close()
                return
            room = self._limit - len(self._kept)
            self._kept += block[:room]
            if len(block) > room:
                self.truncated = True
                if self._cut:
                    self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read)
            os.close(self._read)
            if not self.ended.done():
                self.ended.set_result(None)

    def finish(self) -> bytes:
        """What was kept. Takes what is in the pipe now: a process that ended has written all it ever will, its children do not count."""
        self._drain()
        self._close()
        return bytes(self._kept)


def memory_file(data: bytes) -> int:
    """A descriptor from which a process reads `data`."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
