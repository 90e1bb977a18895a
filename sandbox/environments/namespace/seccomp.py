"""The system-call filter of everything that runs in a sandbox: hand-assembled BPF for x86_64, no library needed.

Refused: socket families other than UNIX, INET, INET6 and NETLINK (AF_VSOCK is not confined by a network namespace), io_uring (it
would pass by the socket rule), everything about mounts and namespaces, bpf, keys, modules, and limits of other processes.
`clone3` is "not implemented", so that libraries fall back to `clone`, whose flags a filter can see.
"""

from __future__ import annotations

import errno
import struct

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_X86_64 = 0xC000003E
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _PRLIMIT64 = 56, 435, 41, 53, 302
_FAMILIES = (1, 2, 10, 16)
_NEW_NAMESPACE = 0x7E020000

_MISSING = (425, 426, 427, _CLONE3)  # io_uring_setup, _enter, _register
_REFUSED = (
    *(155, 161, 165, 166),  # pivot_root, chroot, mount, umount2
    *(163, 167, 168, 169, 179),  # acct, swapon, swapoff, reboot, quotactl
    *(172, 173, 175, 176, 313),  # iopl, ioperm, init_module, delete_module, finit_module
    *(103, 246, 320, 298, 321, 323),  # syslog (the machine's log), kexec_load, kexec_file_load, perf_event_open, bpf, userfaultfd
    *(248, 249, 250),  # add_key, request_key, keyctl
    *(272, 308, 300, 304),  # unshare, setns, fanotify_init, open_by_handle_at
    *(428, 429, 430, 431, 432, 433, 442, 443, 467),  # the new mount interface, quotactl_fd
)

_Instruction = tuple[int, int, int, int]


def _fail(code: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _program() -> list[_Instruction]:
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQ, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_GE, 0, 1, 0x40000000),  # the x32 interface
        _fail(errno.ENOSYS),
    ]
    for number in _MISSING:
        code += [(_JUMP_EQ, 0, 1, number), _fail(errno.ENOSYS)]
    for number in _REFUSED:
        code += [(_JUMP_EQ, 0, 1, number), _fail(errno.EPERM)]
    allow: _Instruction = (_RETURN, 0, 0, _ALLOW)
    argument: _Instruction = (_LOAD, 0, 0, _FIRST_ARGUMENT)
    code += [(_JUMP_EQ, 0, 4, _CLONE), argument, (_JUMP_SET, 0, 1, _NEW_NAMESPACE), _fail(errno.EPERM), allow]
    code += [(_JUMP_EQ, 0, 4, _PRLIMIT64), argument, (_JUMP_EQ, 1, 0, 0), _fail(errno.EPERM), allow]
    code += [(_JUMP_EQ, 2, 0, _SOCKET), (_JUMP_EQ, 1, 0, _SOCKETPAIR), allow, argument]
    for family in _FAMILIES:
        code += [(_JUMP_EQ, 0, 1, family), allow]
    return [*code, _fail(errno.EAFNOSUPPORT)]


PROGRAM = b"".join(struct.pack("HBBI", *instruction) for instruction in _program())
