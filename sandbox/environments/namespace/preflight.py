"""Can this machine run sandboxes? Facts are gathered first, then judged by a pure function."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["rootful", "rootless"]

_USER_ATTRIBUTES = (6, 6)
"""The first Linux whose tmpfs has `user.*` attributes, in which an overlay notes that a directory of the tree below is gone."""


@dataclass(frozen=True)
class Facts:
    system: str
    machine: str
    kernel: tuple[int, int]
    uid: int
    overlay: bool
    user_namespaces: int
    """Highest number of user namespaces that one user may have; 0 when they are off or absent."""
    apparmor_restricts: bool
    capabilities: int
    """Effective capabilities of this process."""


def gather() -> Facts:
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    status = _read("/proc/self/status")
    effective = re.search(r"CapEff:\s*([0-9a-f]+)", status)
    allowed = int(_read("/proc/sys/user/max_user_namespaces") or 0)
    if _read("/proc/sys/kernel/unprivileged_userns_clone").strip() == "0" and os.geteuid():
        allowed = 0
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        kernel=(int(release[1]), int(release[2])) if release else (0, 0),
        uid=os.geteuid(),
        overlay=bool(re.search(r"\boverlay$", _read("/proc/filesystems"), re.MULTILINE)) or shutil.which("modprobe") is not None,
        user_namespaces=allowed,
        apparmor_restricts=_read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").strip() == "1",
        capabilities=int(effective[1], 16) if effective else 0,
    )


def judge(facts: Facts, mode: Mode) -> list[str]:
    """What stands in the way of sandboxes in `mode`, each with what to do; empty when nothing does."""
    if facts.system != "Linux" or facts.machine != "x86_64":
        return [f"the namespace sandbox needs Linux on x86_64, this is {facts.system} on {facts.machine}: use another environment"]
    found = []
    if facts.kernel < (5, 19):
        found.append(f"Linux {facts.kernel[0]}.{facts.kernel[1]} is too old for the namespace sandbox: use 5.19 or newer")
    if not facts.overlay:
        found.append("the kernel has no overlay file system: load it with `modprobe overlay` or use a kernel that has it")
    if mode == "rootful":
        if facts.uid:
            found.append("a rootful sandbox needs root: run as root, or use mode `rootless`")
        elif not facts.capabilities >> 21 & 1:
            found.append("root has no CAP_SYS_ADMIN here (a container?): start the container with --privileged")
    elif facts.kernel < _USER_ATTRIBUTES:
        found.append(
            f"Linux {facts.kernel[0]}.{facts.kernel[1]} keeps no user attributes in memory (tmpfs), so an agent without root could not "
            "remove a directory of its task: use 6.6 or newer, or run as root"
        )
    elif not facts.user_namespaces:
        found.append(
            "user namespaces are off: as root, run `sysctl -w user.max_user_namespaces=10000` and, where it exists, "
            "`sysctl -w kernel.unprivileged_userns_clone=1`"
        )
    elif facts.apparmor_restricts and facts.uid:
        found.append("AppArmor restricts user namespaces: as root, run `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`")
    return found


def problems(mode: Mode) -> list[str]:
    return judge(gather(), mode)


def default_mode() -> Mode:
    return "rootful" if os.geteuid() == 0 else "rootless"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    found = problems(default_mode())
    print("\n".join(found) or "sandboxes can run here")
    sys.exit(bool(found))
