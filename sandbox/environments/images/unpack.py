"""One layer of an image, from a tar stream to a directory that an overlay file system can stack.

The archive is hostile. Every path is walked component by component from the layer's own directory without following a link, so no member
can land outside; what cannot be meant honestly ends the unpacking. A whiteout (`.wh.NAME`, OCI image-spec "layer") becomes the overlay's
character device 0:0, `.wh..wh..opq` the attribute `overlay.opaque`. Devices and pipes are left out: a sandbox has its own /dev. So are
set-id bits, which no sandbox honours, and extended attributes.

As root files keep their numeric owners. An ordinary user owns everything, and can always read and remove it.

`unpack` does it in a process of its own with bounded memory: a header may claim any size. The runner's event loop goes on meanwhile.
"""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO

from sandbox.environments.errors import ImageError

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_BLOCK = 1 << 18
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ID = 2**31
_MAX_DEPTH = 200
_MEMORY = 1 << 30
_ENTRY = 1024
"""What an entry counts at least, in bytes: it needs an inode and a name."""
_REFUSED = 3
_SOURCE = str(Path(__file__).parents[3])
_BOOT = """
import sys
sys.path.append(sys.argv[1])
from sandbox.environments.images.unpack import main
main(sys.argv[2], int(sys.argv[3]))
"""


def unpack(stream: IO[bytes], target: Path, max_bytes: int) -> int:
    """Unpack an uncompressed tar into the empty directory `target`; returns the bytes of all files.

    Raises ImageError for an archive that is broken, not honest, or larger than `max_bytes` unpacked.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, _SOURCE, str(target), str(max_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
    ) as process:
        assert process.stdin is not None  # noqa: S101 -- asked for above
        try:
            while block := stream.read(_BLOCK):
                process.stdin.write(block)
            written, words = process.communicate()
        except BrokenPipeError:  # it has seen enough
            written, words = b"", process.communicate()[1]
        except BaseException:  # the stream is bad, or the caller is ended
            process.kill()
            raise
    if process.returncode != 0:
        said = words.decode(errors="replace").strip()
        raise ImageError(
            said if process.returncode == _REFUSED else f"an image layer cannot be unpacked: {said[-300:] or process.returncode}"
        )
    return int(written)


def main(target: str, max_bytes: int) -> None:
    """The process of `unpack`: the tar arrives on standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        print(unpack_here(sys.stdin.buffer, Path(target), max_bytes))
    except (ImageError, MemoryError) as error:
        sys.stderr.write(str(error) or "an image layer needs too much memory: one of its headers is no honest one")
        sys.exit(_REFUSED)


def unpack_here(stream: IO[bytes], target: Path, max_bytes: int) -> int:
    """`unpack` in this process."""
    unpacker = _Unpacker(target, max_bytes)
    try:
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive:
            for member in archive:
                unpacker.add(archive, member)
        unpacker.finish()
    except tarfile.TarError as error:
        raise ImageError(f"a layer is no complete tar archive: {error}") from error
    finally:
        unpacker.close()
    return unpacker.bytes


class _Unpacker:
    def __init__(self, target: Path, max_bytes: int) -> None:
        self._root = os.open(target, _DIRECTORY)
        self._parent: tuple[str, ...] = ()
        self._parent_fd = self._root
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._owned = os.geteuid() == 0
        self._modes: dict[tuple[str, ...], tarfile.TarInfo] = {}
        """Of directories, for when all is written: a directory may forbid writing."""
        self.bytes = 0

    def close(self) -> None:
        if self._parent_fd != self._root:
            os.close(self._parent_fd)
        os.close(self._root)

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _parts(member.name)
        self._left -= _ENTRY + (member.size if member.isreg() else 0)
        if self._left < 0:
            raise ImageError(f"an image layer is larger than the {self._max_bytes >> 20} MB that one may have")
        try:
            self._add(archive, member, path)
        except (NotADirectoryError, IsADirectoryError, FileExistsError, FileNotFoundError) as error:
            raise _refuse(member, f"leads through or over something else in this layer ({error.strerror})") from error
        except OSError as error:
            if error.errno == 40:  # ELOOP: O_NOFOLLOW met a link
                raise _refuse(member, "leads through a link") from error
            raise ImageError(f"cannot unpack {member.name!r}: {error.strerror}") from error

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: tuple[str, ...]) -> None:
        if not path:
            self._modes[()] = member
            return
        name = path[-1]
        if name == _OPAQUE:
            self._opaque(path[:-1])
        elif name.startswith(_WHITEOUT + _WHITEOUT):
            pass  # bookkeeping of an old union file system
        elif name.startswith(_WHITEOUT):
            self._whiteout(path[:-1], name.removeprefix(_WHITEOUT), member)
        elif member.isdir():
            self._directory(path, member)
        elif member.isreg():
            self._file(archive, path, member)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=self._fresh(path))
            self._own(name, member)
        elif member.islnk():
            self._link(path, member)

    def _enter(self, path: tuple[str, ...]) -> int:
        """A descriptor of a directory of this layer, made where it is missing. It stays open until the next call."""
        if path == self._parent:
            return self._parent_fd
        if self._parent_fd != self._root:
            os.close(self._parent_fd)
        self._parent, self._parent_fd = (), self._root
        fd = os.dup(self._root)
        try:
            for name in path:
                try:
                    inner = os.open(name, _DIRECTORY, dir_fd=fd)
                except FileNotFoundError:
                    os.mkdir(name, 0o755, dir_fd=fd)
                    inner = os.open(name, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:  # whatever ends the walk, its last directory is open and nobody else knows of it
            os.close(fd)
            raise
        self._parent, self._parent_fd = path, fd
        return fd

    def _fresh(self, path: tuple[str, ...]) -> int:
        """The directory for `path`, in which nothing has its last component's name any more."""
        fd = self._enter(path[:-1])
        if (mode := _mode(path[-1], fd)) is not None:
            if stat.S_ISDIR(mode):
                raise FileExistsError(17, "a directory with this name exists")
            os.unlink(path[-1], dir_fd=fd)
        return fd

    def _directory(self, path: tuple[str, ...], member: tarfile.TarInfo) -> None:
        fd = self._enter(path[:-1])
        mode = _mode(path[-1], fd)
        if mode is None or not stat.S_ISDIR(mode):
            os.mkdir(path[-1], 0o700, dir_fd=self._fresh(path))
            if mode is not None and stat.S_ISCHR(mode):  # removed and made again by the same layer
                self._opaque(path)
        self._modes[path] = member

    def _file(self, archive: tarfile.TarFile, path: tuple[str, ...], member: tarfile.TarInfo) -> None:
        self.bytes += member.size
        content = archive.extractfile(member)
        assert content is not None  # a regular member  # noqa: S101
        fd = os.open(path[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fresh(path))
        with open(fd, "wb", buffering=0) as file:
            while block := content.read(_BLOCK):
                file.write(block)
            if self._owned:
                os.fchown(fd, _id(member, member.uid), _id(member, member.gid))
            os.fchmod(fd, member.mode & 0o777 if self._owned else member.mode & 0o777 | 0o600)
            os.utime(fd, (_time(member), _time(member)))

    def _link(self, path: tuple[str, ...], member: tarfile.TarInfo) -> None:
        source = _parts(member.linkname)
        if not source:
            raise _refuse(member, "links to the root directory")
        target = os.dup(self._fresh(path))
        try:
            fd = self._enter(source[:-1])
            mode = _mode(source[-1], fd)
            if mode is None or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise _refuse(member, f"links to {member.linkname!r}, which is no file of this layer")
            os.link(source[-1], path[-1], src_dir_fd=fd, dst_dir_fd=target, follow_symlinks=False)
        finally:
            os.close(target)

    def _whiteout(self, directory: tuple[str, ...], name: str, member: tarfile.TarInfo) -> None:
        if name in ("", ".", ".."):
            raise _refuse(member, "is a whiteout of nothing")
        fd = self._enter(directory)
        mode = _mode(name, fd)
        if mode is None:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=fd)
        elif stat.S_ISDIR(mode):
            self._opaque((*directory, name))

    def _opaque(self, directory: tuple[str, ...]) -> None:
        """Root's overlays read the one attribute, an ordinary user's the other."""
        fd = self._enter(directory)
        os.setxattr(fd, "user.overlay.opaque", b"y")
        if self._owned:
            os.setxattr(fd, "trusted.overlay.opaque", b"y")

    def _own(self, name: str, member: tarfile.TarInfo) -> None:
        if self._owned:
            os.chown(name, _id(member, member.uid), _id(member, member.gid), dir_fd=self._parent_fd, follow_symlinks=False)

    def finish(self) -> None:
        """Owners, modes and times of directories, the deepest first."""
        for path, member in sorted(self._modes.items(), reverse=True):
            fd = self._enter(path)
            if self._owned:
                os.fchown(fd, _id(member, member.uid), _id(member, member.gid))
            os.fchmod(fd, member.mode & 0o1777 if self._owned else member.mode & 0o1777 | 0o700)
            os.utime(fd, (_time(member), _time(member)))


def _parts(name: str) -> tuple[str, ...]:
    """The components of a member's name. Raises ImageError for one that could lead out of its layer."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name or len(parts) > _MAX_DEPTH:
        raise ImageError(f"the image is refused: its archive has a member {name[:200]!r}, which leads out of its layer, or too deep")
    return parts


def _refuse(member: tarfile.TarInfo, why: str) -> ImageError:
    return ImageError(f"the image is refused: the member {member.name!r} of its archive {why}")


def _id(member: tarfile.TarInfo, number: int) -> int:
    if not 0 <= number < _MAX_ID:
        raise _refuse(member, f"has the owner {number}")
    return number


def _time(member: tarfile.TarInfo) -> float:
    return min(max(float(member.mtime), 0.0), 2.0**33)


def _mode(name: str, fd: int) -> int | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
