"""Archives that the engine hands out of a container, and whose doing it is when one cannot be had. Everything here blocks.

An engine answers alike where a tree cannot be packed and where its own disk fails. So it is asked again, and when that fails too, for a
file of ours in the same container: an engine that cannot hand out that one is at fault, and so is one whose words are those of a machine
in trouble. What is left is the tree. Words count only as the name of an error that stands at their end: before it are names that an agent
may have chosen.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tarfile
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

from sandbox.environments.errors import SandboxError

from .engine import EngineLost

_BLOCK = 1 << 18
_PAUSE_S = 0.5
_OURS = "/etc/passwd"
"""Written by us into every image, and by nobody in a container but its root, which no agent is."""
_END = bytes(2 * tarfile.BLOCKSIZE)
_EARLY = "it ends too early"
_FULL = {os.strerror(number).lower() for number in (errno.ENOSPC, errno.EDQUOT)}
_TROUBLE = (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS, errno.ESTALE, errno.EUCLEAN, errno.EAGAIN, errno.ENODEV)
_MACHINE = _FULL | {os.strerror(number).lower() for number in _TROUBLE}


class Unread(SandboxError):
    """An archive did not come, or not to its end. `status` is the engine's answer, 0 where it began to send one or said nothing in time."""

    def __init__(self, message: str, status: int = 0, again: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.again = again
        """Whether asking once more may help."""

    @property
    def cause(self) -> str:
        """What the operating system said, when the message ends with it."""
        return str(self).rpartition(": ")[2].strip().lower()


def fairly[T](api: Any, container: str, read: Callable[[], T], full: bool = False) -> T:
    """What `read` finds in archives of a container, tried twice. `full`: the container has no room left, by its own doing.

    Raises EngineLost when the engine is why it cannot be read, Unread when the tree is, and what else `read` raises.
    """
    try:
        return read()
    except Unread as first:
        if not first.again:
            raise _blamed(api, container, first, full) from first
    time.sleep(_PAUSE_S)
    try:
        return read()
    except Unread as second:
        raise _blamed(api, container, second, full) from second


def _blamed(api: Any, container: str, error: Unread, full: bool) -> SandboxError:
    if full and error.cause in _FULL:
        return error
    if error.cause in _MACHINE:
        return EngineLost(f"the Docker engine cannot hand out what a container holds: {error}")
    try:
        with opened(api, container, _OURS, 1 << 20, f"{_OURS} of the same container") as tar:
            if any(member.isreg() and member.size for member in tar):
                return error
        words = f"{_OURS} of the same container is not there"
    except SandboxError as other:
        words = str(other)
    return EngineLost(f"the Docker engine cannot hand out what a container holds: {error}; {words}")


@contextlib.contextmanager
def opened(api: Any, container: str, path: str, limit: int, what: str) -> Iterator[tarfile.TarFile]:
    """The archive of a path, of at most `limit` bytes. `what` begins the message of an error. Raises Unread, SandboxError."""
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    with contextlib.closing(asked(api, container, path, what)[0]) as chunks:
        try:
            source = io.BufferedReader(_Source(chunks, limit, what), _BLOCK)  # type: ignore[arg-type]
            with tarfile.open(fileobj=source, mode="r|") as tar:
                yield tar
        except (RequestException, HTTPError, ConnectionError) as error:
            if not _is_late(error):
                raise  # the way to the engine is broken: that is no agent's doing
            raise Unread(f"{what} cannot be read: the engine sent nothing for long", again=False) from error
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise Unread(f"{what} cannot be read: {error}") from error


def asked(api: Any, container: str, path: str, what: str) -> tuple[Generator[bytes, None, None], dict[str, Any]]:
    """The chunks of an archive, which the caller closes, and what the engine says of the path. Raises Unread."""
    from docker.errors import APIError
    from requests.exceptions import Timeout

    try:
        return cast(tuple[Generator[bytes, None, None], dict[str, Any]], api.get_archive(container, path, chunk_size=_BLOCK))
    except APIError as error:
        status = error.status_code or 0
        raise Unread(f"{what} cannot be read: {error.explanation or error}", status, again=status >= 500) from error
    except Timeout as error:
        raise Unread(f"{what} cannot be read: the engine did not answer for long", again=False) from error


def _is_late(error: Exception) -> bool:
    """A read that timed out, which `requests` wraps once more while it streams."""
    from requests.exceptions import Timeout
    from urllib3.exceptions import ReadTimeoutError

    return isinstance(error, Timeout | ReadTimeoutError) or any(isinstance(cause, ReadTimeoutError) for cause in error.args)


class _Source(io.RawIOBase):
    """The chunks of a response as a file, of at most `limit` bytes. ReadError where it does not end as archives do."""

    def __init__(self, chunks: Iterator[bytes], limit: int, what: str) -> None:
        self._chunks = chunks
        self._limit = limit
        self._what = what
        self._left = b""
        self._tail = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            self._left = next(self._chunks, b"")
            self._limit -= len(self._left)
            if self._limit < 0:
                raise SandboxError(f"{self._what} is larger than the limit")
            if not self._left:
                if self._tail != _END:
                    raise tarfile.ReadError(_EARLY)
                return 0
            self._tail = (self._tail + self._left)[-len(_END) :]
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def below(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Members with their names relative to the path that was asked for, whose last component the archive's names begin with.

    Raises ReadError for an archive without its end, which `tarfile` takes for whole where it stops between two members.
    """
    for member in tar:
        _, _, name = member.name.partition("/")
        yield member, name
    if tar.fileobj is None or tar.fileobj.tell() - tar.offset != tarfile.BLOCKSIZE:
        raise tarfile.ReadError(_EARLY)
