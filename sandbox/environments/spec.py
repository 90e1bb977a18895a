"""What a sandbox is made from and what it answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from server.schemas.runspec import Limits

User = Literal["agent", "root"]
LimitsMode = Literal["cgroup", "rlimit"]

OPEN_FILES = 4096
UNWATCHED_CPU_S = 30
"""CPU seconds that one process may use beyond what all of a sandbox may together, where somebody watches the whole. With less, its own end
could come before anybody looks, and a command whose parts all ended so would seem to have ended by itself."""
DEFAULT_ENV: Mapping[str, str] = MappingProxyType(
    {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/agent", "USER": "agent", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108 -- in the sandbox
)


@dataclass(frozen=True)
class RoMount:
    """A host file or directory, read-only at `target` (by default the same path)."""

    source: Path
    target: str = ""

    @property
    def at(self) -> str:
        return self.target or str(self.source)


@dataclass(frozen=True)
class Directory:
    """An empty directory to make in the sandbox. `root` owns what the agent must not write."""

    path: str
    owner: User = "agent"
    mode: int = 0o755


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox. `workspace` is the pristine tree: never written, seen at `workdir` under an upper layer of the sandbox's own."""

    workspace: Path | None = None
    workdir: str = "/workspace"
    mounts: tuple[RoMount, ...] = ()
    directories: tuple[Directory, ...] = ()
    limits: Limits = field(default_factory=Limits)
    image: str | None = None
    """What the rest of the file system comes from, where the backend has images."""
    grading: bool = False
    """The verifier's sandbox: `root` in it may become `agent`, kill its processes, and nothing more. It has no gate."""
    name: str = ""
    """Of the trial, for people who look at what runs: never a key, need not be unique."""

    def __post_init__(self) -> None:
        for path in (self.workdir, *(mount.at for mount in self.mounts), *(directory.path for directory in self.directories)):
            if not path.startswith("/") or os.path.normpath(path) != path or path == "/":
                raise ValueError(f"{path!r} is no absolute path without `.`, `..` and trailing slash")


@dataclass(frozen=True)
class ExecResult:
    """`return_code` is negative for a signal. Output beyond the limit was read and thrown away (`truncated`)."""

    stdout: bytes
    stderr: bytes
    return_code: int
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class UsageReport:
    """Facts for "the agent broke its own sandbox". Memory and process counters need cgroups and are 0 with rlimits."""

    running: bool
    cpu_s: float
    cpu_exceeded: bool
    memory_peak: int
    out_of_memory: int
    process_limit_hits: int
    disk_used: int
    disk_full: bool
