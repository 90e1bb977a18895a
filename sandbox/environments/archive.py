"""Tar archives on the host's side. What comes out of a sandbox is data: no link in it is followed or made, no device, no path upwards."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from .namespace.transfer import OPAQUE, SINGLE, WHITEOUT

_DEEPEST = 100
"""Directories in each other that are made on the host, whose tools stop at a thousand and could not even remove them."""


@dataclass(frozen=True)
class Change:
    """One path that differs from the pristine tree, relative to the work directory. `data` is a file's content or a link's target."""

    path: str
    kind: Literal["file", "link", "directory", "deleted"]
    mode: int = 0
    data: bytes = b""


def pack(source: Path, target: str) -> tuple[bytes, str]:
    """A tar of a file (named as `target`'s last component) or of a directory's content, and the directory where it belongs."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if source.is_dir():
            directory = target
            for child in sorted(source.iterdir()):
                tar.add(child, child.name)
        else:
            directory = str(PurePosixPath(target).parent)
            tar.add(source.resolve(), PurePosixPath(target).name)
    return output.getvalue(), directory


def extract(data: bytes, target: Path, cut: bool = False) -> list[str]:
    """Write an archive made by `transfer.pack`; returns the names that were left out.

    The archive of a single file becomes the file `target`. In a directory what is there already stays: it is the host's own record, and an
    agent may not put another in its place. `cut`: `data` may be the beginning of one, whose last file is as long as what is there of it.
    """
    skipped = []
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(*((tarfile.TarError,) if cut else ())), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            if SINGLE in member.pax_headers:
                target.unlink(missing_ok=True)
                _write(target, _content(data, member), member.mode & 0o777 | 0o600)
                continue
            path = target / member.name
            try:
                if not _is_inside(member.name) or member.name.count("/") > _DEEPEST:
                    skipped.append(member.name)
                elif member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                elif member.isreg():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write(path, _content(data, member), member.mode & 0o777 | 0o600)
                else:
                    skipped.append(member.name)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG):
                    raise
                skipped.append(member.name)
    return skipped


def changes(data: bytes, pristine: Path | None) -> list[Change]:
    """The changes in an upper layer packed by `transfer.pack`, against the pristine tree; what was only touched is left out."""
    found: dict[str, Change] = {}
    opaque: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            name = member.name
            if WHITEOUT in member.pax_headers:
                found[name] = Change(name, "deleted")
            elif member.isdir():
                found[name] = Change(name, "directory", member.mode)
                opaque += [name] if OPAQUE in member.pax_headers else []
            elif member.issym():
                found[name] = Change(name, "link", data=os.fsencode(member.linkname))
            elif member.isreg():
                found[name] = Change(name, "file", member.mode, _content(data, member))
    if pristine is None:
        return list(found.values())
    for name in opaque:
        for hidden in _names_below(pristine, name):
            found.setdefault(hidden, Change(hidden, "deleted"))
    return sorted((change for change in found.values() if change != original(pristine, change.path)), key=lambda change: change.path)


def original(pristine: Path, name: str) -> Change:
    """The pristine tree's own entry, `deleted` for none. The tree is the host's, only the name is the sandbox's, without a component `..`.

    A link of the tree is never followed: behind it lies the host.
    """
    path = pristine / name
    try:
        status = path.lstat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
        return Change(name, "deleted")
    if _behind_link(pristine, name):
        return Change(name, "deleted")
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return Change(name, "link", data=os.fsencode(path.readlink()))
    if stat.S_ISDIR(status.st_mode):
        return Change(name, "directory", mode)
    return Change(name, "file", mode, path.read_bytes()) if stat.S_ISREG(status.st_mode) else Change(name, "deleted")


def _behind_link(pristine: Path, name: str) -> bool:
    return any((pristine / parent).is_symlink() for parent in PurePosixPath(name).parents)


def _names_below(pristine: Path, name: str) -> list[str]:
    path = pristine / name
    if not path.is_dir() or path.is_symlink() or _behind_link(pristine, name):
        return []
    return [str(found.relative_to(pristine)) for found in path.rglob("*")]


def _content(data: bytes, member: tarfile.TarInfo) -> bytes:
    return data[member.offset_data : member.offset_data + member.size]


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/")


def _write(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
