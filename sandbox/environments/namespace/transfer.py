"""Tar streams written and read inside a sandbox or a chroot, by a forked child without privileges over the machine.

Links that an agent planted resolve inside, never on the host. Only the header code of `tarfile` is used.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO

SINGLE = "single"
WHITEOUT = "whiteout"
OPAQUE = "opaque"
MOST = 1 << 17
"""Entries of a tree that are looked at: with a header of 512 bytes each they are all that a diff of 64 MiB could hold."""
DEEPEST = 256
"""Directories in each other that are looked into."""


def pack(path: str, output: IO[bytes], overlay: bool = False) -> None:
    """Write the file or directory `path` as a tar stream; a directory's entries are named relative to it, a file carries `single`.

    `path` itself may be a link, which resolves in this process's own root. What is neither regular, directory nor link is left out.
    With `overlay` the directory is the upper layer of an overlay: a whiteout becomes an empty entry with the PAX record `whiteout`,
    an opaque directory carries `opaque`. Raises OSError, behind what was written before, for a directory that `walk` does not finish.
    """
    path = os.path.realpath(path)
    if os.path.isdir(path):
        for name, place, status in walk(path):
            _pack_entry(place, name, status, output, overlay)
    elif os.path.isfile(path):
        info = tarfile.TarInfo(os.path.basename(path))
        info.mode, info.pax_headers = os.stat(path).st_mode & 0o7777, {SINGLE: "y"}
        _pack_file(path, info, output)
    else:
        raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
    output.write(bytes(2 * tarfile.BLOCKSIZE))
    output.flush()


def walk(top: str, left_out: frozenset[str] = frozenset(), most: int = MOST) -> Iterator[tuple[str, str, os.stat_result]]:
    """(relative name, path, lstat) of everything below a directory but `left_out` and what is in it. No link is followed.

    Who takes only the beginning gets as many files as there can be: a directory's small ones first, what is in its directories last.
    Raises OSError at more than `most` entries or DEEPEST directories in each other: millions of pipes weigh nothing and take minutes.
    """
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        if prefix.count("/") > DEEPEST:
            raise OSError(errno.ENAMETOOLONG, f"directories are nested deeper than {DEEPEST}", top)
        found = []
        with os.scandir(f"{top}/{prefix}") as listing:
            for entry in listing:
                if prefix + entry.name in left_out:
                    continue
                if (most := most - 1) < 0:
                    raise OSError(errno.EFBIG, "there are more files and directories than a diff can hold", top)
                found.append((*_rank(entry), entry.name))
        found.sort()
        waiting += [f"{prefix}{name}/" for directory, _, name in reversed(found) if directory]
        for _, _, name in found:
            path = f"{top}/{prefix}{name}"
            yield prefix + name, path, os.lstat(path)


def _rank(entry: os.DirEntry[str]) -> tuple[bool, int]:
    status = entry.stat(follow_symlinks=False)
    directory = stat.S_ISDIR(status.st_mode)
    return directory, 0 if directory else status.st_size


def _pack_entry(path: str, name: str, status: os.stat_result, output: IO[bytes], overlay: bool) -> None:
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = status.st_mode & 0o7777, int(status.st_mtime)
    if stat.S_ISREG(status.st_mode):
        _pack_file(path, info, output)
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        _header(info, output)
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        if overlay and _is_opaque(path):
            info.pax_headers = {OPAQUE: "y"}
        _header(info, output)
    elif overlay and stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        info.pax_headers = {WHITEOUT: "y"}
        _header(info, output)


def _is_opaque(path: str) -> bool:
    for attribute in ("trusted.overlay.opaque", "user.overlay.opaque"):
        try:
            if os.getxattr(path, attribute, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue
    return False


def _pack_file(path: str, info: tarfile.TarInfo, output: IO[bytes]) -> None:
    """A file may change its size while it is read: the header's size is kept by cutting or padding."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as file:
        info.size = left = os.fstat(fd).st_size
        _header(info, output)
        while left and (block := file.read(min(left, 1 << 18))):
            output.write(block)
            left -= len(block)
    output.write(bytes(left + -info.size % tarfile.BLOCKSIZE))


def _header(info: tarfile.TarInfo, output: IO[bytes]) -> None:
    output.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def unpack(path: str, source: IO[bytes]) -> None:
    """Extract a tar stream from the host below `path`, which is made if missing; a last component that is a link is replaced."""
    os.makedirs(path, exist_ok=True)
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            target = f"{path}/{member.name}"
            if member.isdir():
                os.makedirs(target, exist_ok=True)
                os.chmod(target, member.mode)
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.lexists(target):
                os.unlink(target)
            if member.issym():
                os.symlink(member.linkname, target)
            elif member.isreg():
                _unpack_file(archive, member, target)


def _unpack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> None:
    content = archive.extractfile(member)
    assert content is not None  # a regular member  # noqa: S101
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        while block := content.read(1 << 18):
            file.write(block)
        os.fchmod(fd, member.mode & 0o777)
