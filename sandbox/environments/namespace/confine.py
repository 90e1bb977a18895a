"""Privileges of a process in a sandbox: who it may be, and how a process becomes that for good."""

from __future__ import annotations

import os
from typing import NamedTuple

from sandbox.environments.child import set_limits

from . import kernel
from .seccomp import PROGRAM

ROOT_CAPABILITIES = sum(
    1 << number
    for number in (
        kernel.CAP_CHOWN,
        kernel.CAP_DAC_OVERRIDE,
        kernel.CAP_FOWNER,
        kernel.CAP_FSETID,
        kernel.CAP_KILL,
        kernel.CAP_SETGID,
        kernel.CAP_SETUID,
    )
)
"""What `root` in a sandbox keeps: power over the sandbox's own files and processes, none over mounts, network or the machine."""


class Identity(NamedTuple):
    """`agent` runs untrusted code. `root` owns what the agent must not write and is for commands of the host only."""

    uid: int
    gid: int
    capabilities: int = 0


def become(identity: Identity, limits: dict[str, int], change_ids: bool = True) -> None:
    """Take on `identity` irrevocably: limits, ids, capabilities, no_new_privs and the system-call filter.

    `change_ids` is False in rootless mode, where the user namespace maps only one id and the process has it already.
    """
    set_limits(limits)
    kernel.drop_bounding_set(keep=identity.capabilities)
    if change_ids:
        os.setgroups([])
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    kernel.set_capabilities(identity.capabilities)
    kernel.no_new_privileges()
    kernel.install_filter(PROGRAM)
