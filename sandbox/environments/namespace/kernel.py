"""System calls that the standard library of Python 3.12 lacks (x86_64). Every failure is an OSError that names the call."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

_libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP = range(9)
CAP_SYS_ADMIN, LAST_CAP = 21, 63

_PIVOT_ROOT, _OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR, _CLOSE_RANGE = 155, 428, 429, 442, 436
_AT_EMPTY_PATH, _AT_RECURSIVE = 0x1000, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    _check(result, f"mount {kind} on {target}")


def make_private(target: str) -> None:
    """Stop mount events from leaving or entering this mount namespace."""
    _check(_libc.mount(None, target.encode(), None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount private")


def unmount(target: str) -> None:
    """Detach at once; the mount ends when its last user does."""
    _check(_libc.umount2(target.encode(), 2), f"umount {target}")


def bind(source: str, target: str, attributes: int, user_namespace: int | None = None, recursive: bool = True) -> None:
    """Clone the mount tree at `source` to `target`; `attributes` hold before it becomes visible.

    With `user_namespace` (a descriptor) the files' owners are mapped through it (kernel 5.12, or 5.19 below an overlay).
    """
    deep = _AT_RECURSIVE if recursive else 0
    tree = _check(_libc.syscall(_OPEN_TREE, -100, source.encode(), 1 | os.O_CLOEXEC | deep), f"open_tree {source}")
    try:
        wanted = attributes | (ATTR_IDMAP if user_namespace is not None else 0)
        data = struct.pack("QQQQ", wanted, 0, 0, user_namespace or 0)
        _check(_libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | deep, data, len(data)), f"mount_setattr {source}")
        _check(_libc.syscall(_MOVE_MOUNT, tree, b"", -100, target.encode(), 4), f"move_mount {target}")
    finally:
        os.close(tree)


def pivot(root: str) -> None:
    """Make the mount at `root` the root directory and let go of the old one."""
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT, b".", b"."), f"pivot_root {root}")
    unmount(".")
    os.chdir("/")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), f"setns {kind:#x}")


def _prctl(option: int, first: int, what: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)), what)


def die_with_parent() -> None:
    """SIGKILL when the parent ends. A change of credentials clears it: call again after one."""
    _prctl(_PR_SET_PDEATHSIG, 9, "PR_SET_PDEATHSIG")


def hide_memory() -> None:
    """No core dump, and no other process of the same user may trace this one or read its memory."""
    _prctl(_PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE")


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def drop_bounding_set(keep: int = 0) -> None:
    """Remove every capability outside the bit mask `keep` from the bounding set; needs CAP_SETPCAP."""
    for number in range(LAST_CAP + 1):
        if not keep >> number & 1 and _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            if ctypes.get_errno() == 22:  # EINVAL: above the kernel's last capability
                return
            raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


def set_capabilities(mask: int) -> None:
    """Effective and permitted become `mask`, inheritable becomes empty."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(header, struct.pack("IIIIII", low, low, 0, high, high, 0)), "capset")


def install_filter(program: bytes) -> None:
    """Install a seccomp BPF program (8 bytes an instruction) for this process and its future children."""
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(header), zero, zero), "PR_SET_SECCOMP")


def close_all_from(first: int, keep: tuple[int, ...] = ()) -> None:
    """Close every descriptor >= `first` except those in `keep`."""
    for fd in sorted(fd for fd in keep if fd >= first):
        if fd > first:
            _libc.syscall(_CLOSE_RANGE, first, fd - 1, 0)
        first = fd + 1
    _libc.syscall(_CLOSE_RANGE, first, 0xFFFFFFFF, 0)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
