"""Process 1 of the kernel that `up` starts: `TOOLS STATE COMMAND …`. Mounts what a machine has, runs the command, and turns itself off."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from sandbox.environments.namespace import kernel

MARK = "LEGO_TEST_UML"
"""Tells a test that it runs there: the directory of unpacked packages."""
_MODULES = ("overlay", "loop", "crc-ccitt", "ipv6")
_MOUNTS = (
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("cgroup2", "/sys/fs/cgroup", ""),
    ("tmpfs", "/run", "mode=755"),
    ("tmpfs", "/tmp", "mode=1777"),  # noqa: S108 -- it is empty and ours
    ("tmpfs", "/dev/shm", "mode=1777"),  # noqa: S108 -- so is this
    ("devpts", "/dev/pts", "ptmxmode=666"),
)
_FINIT_MODULE, _POWER_OFF = 313, 0x4321FEDC


def main(tools: Path, state: Path, command: list[str]) -> None:
    for kind, target, options in _MOUNTS:
        Path(target).mkdir(parents=True, exist_ok=True)
        kernel.mount(kind, target, kind, 0, options)
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpu +io +memory +pids")  # as every init does
    for name in _MODULES:
        _load(next((tools / "usr/lib/uml/modules").rglob(f"{name}.ko")))
    kernel.loopback_up()
    with (state / "output").open("wb") as output:
        ran = subprocess.run(command, env=os.environ | {MARK: str(tools)}, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    (state / "status").write_text(str(ran.returncode if ran.returncode >= 0 else 128 - ran.returncode))


def _load(module: Path) -> None:
    with module.open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).syscall(_FINIT_MODULE, file.fileno(), b"", 0):
            raise OSError(ctypes.get_errno(), "cannot be loaded", str(module))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    finally:  # a kernel whose process 1 ends panics, and says nothing of why
        sys.stderr.flush()
        os.sync()
        ctypes.CDLL(None).reboot(_POWER_OFF)
