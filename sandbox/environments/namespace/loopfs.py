"""A file system of limited size on disk: a sparse file without a name, behind a loop device that goes with its last mount.

Nothing is left when whoever made it is killed: the file has no name, and the device is cleared by the kernel. Only for root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import subprocess

from . import kernel

_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
_MAJOR = 7
_TRIES = 100
_MKFS = ("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal,^resize_inode", "-E", "nodiscard,root_owner=0:0")
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"


class Disks:
    """Makes them below the directory `place`; file systems are copies of one that was made for the same size."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._blank: dict[int, int] = {}

    def mount(self, target: str, megabytes: int) -> None:
        """Raises OSError."""
        if megabytes not in self._blank:
            self._blank[megabytes] = self._make(megabytes)
        file = self._nameless(megabytes << 20)
        try:
            _copy(self._blank[megabytes], file)
            device, path = _attach(file)
        finally:
            os.close(file)
        try:
            kernel.mount(path, target, "ext4", kernel.MS_NOSUID | kernel.MS_NODEV, "")
        finally:
            os.close(device)  # the mount holds it from now on
        os.chmod(target, 0o711)  # noqa: S103 -- as the tmpfs that it stands for

    def _nameless(self, size: int) -> int:
        file = os.open(self._place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, size)
        return file

    def _make(self, megabytes: int) -> int:
        file = self._nameless(megabytes << 20)
        inodes = ("-N", str(max(16384, 256 * megabytes)))
        command = [*_MKFS, *inodes, f"/proc/self/fd/{file}"]
        done = subprocess.run(command, env={"PATH": _PATH}, pass_fds=(file,), capture_output=True, check=False)
        if done.returncode != 0:
            os.close(file)
            raise OSError(errno.EIO, f"mkfs.ext4 failed: {done.stderr.decode(errors='replace').strip()[-200:]}")
        return file


def _copy(source: int, target: int) -> None:
    """What is not a hole."""
    at = 0
    while True:
        try:
            begin = os.lseek(source, at, os.SEEK_DATA)
        except OSError as end:
            if end.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(source, begin, os.SEEK_HOLE)
        offset = begin
        while offset < at:
            offset += os.pwrite(target, os.pread(source, min(at - offset, 1 << 20), offset), offset)


def _attach(file: int) -> tuple[int, str]:
    """A loop device over `file` that is cleared with its last user: its descriptor and its path."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _GET_FREE)
            path = f"/dev/loop{number}"
            device = _open(path, number)
            # struct loop_config: fd, block size, then struct loop_info64, whose lo_flags stand behind 52 bytes
            config = bytearray(304)
            struct.pack_into("=II", config, 0, file, 0)
            struct.pack_into("=I", config, 8 + 52, _AUTOCLEAR)
            try:
                fcntl.ioctl(device, _CONFIGURE, bytes(config))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # somebody else was faster
                    raise
                continue
            return device, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device is free")


def _open(path: str, number: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # /dev is not kept by the kernel here
        os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(_MAJOR, number))
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
