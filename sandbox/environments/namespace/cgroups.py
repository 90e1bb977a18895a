"""Cgroups of a spawner: one group of its own, one child group per sandbox. Version 2, version 1, or both side by side.

`find` answers where groups can be made, by making one and moving a process in. None means that limits must be rlimits.
On a mixed machine the controllers are in version 1, and version 2 without controllers still gives `cgroup.kill`.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_V1 = ("memory", "pids", "cpuacct")
_V2 = ("memory", "pids")


@dataclass(frozen=True)
class Usage:
    """Counters of one sandbox since its start; zeros where the machine does not count."""

    cpu_s: float = 0.0
    memory_peak: int = 0
    out_of_memory: int = 0
    """Processes killed at the memory limit."""
    process_limit_hits: int = 0


@dataclass(frozen=True)
class Group:
    """Directories of one group: `memory`, `pids`, `cpuacct`, `tree`. With version 2 alone there is only `tree`."""

    paths: dict[str, str]

    def child(self, name: str) -> Group:
        """Make the group of a sandbox."""
        group = Group({kind: f"{path}/{name}" for kind, path in self.paths.items()})
        for path in group.paths.values():
            os.mkdir(path)
        return group

    def limit(self, memory: int, processes: int) -> None:
        """`memory` in bytes without swap, `processes` counts threads too."""
        if "memory" in self.paths:
            _write(self.paths["memory"], "memory.limit_in_bytes", memory)
            _write_if_present(self.paths["memory"], "memory.memsw.limit_in_bytes", memory)
            _write(self.paths["pids"], "pids.max", processes)
        else:
            _write(self.paths["tree"], "memory.max", memory)
            _write_if_present(self.paths["tree"], "memory.swap.max", 0)
            _write(self.paths["tree"], "pids.max", processes)

    def join(self) -> None:
        """Move the calling process in."""
        for path in self.paths.values():
            _write(path, "cgroup.procs", 0)

    def kill(self) -> bool:
        """SIGKILL to every process of the group; False when this kernel has no `cgroup.kill`."""
        return "tree" in self.paths and _write_if_present(self.paths["tree"], "cgroup.kill", 1)

    def usage(self) -> Usage:
        if "memory" in self.paths:
            return Usage(
                cpu_s=self.cpu_s(),
                memory_peak=int(_read(self.paths["memory"], "memory.max_usage_in_bytes") or 0),
                out_of_memory=_field(self.paths["memory"], "memory.oom_control", "oom_kill"),
                process_limit_hits=_field(self.paths["pids"], "pids.events", "max"),
            )
        tree = self.paths["tree"]
        return Usage(
            cpu_s=self.cpu_s(),
            memory_peak=int(_read(tree, "memory.peak") or 0),
            out_of_memory=_field(tree, "memory.events", "oom_kill"),
            process_limit_hits=_field(tree, "pids.events", "max"),
        )

    def cpu_s(self) -> float:
        if "cpuacct" in self.paths:
            return int(_read(self.paths["cpuacct"], "cpuacct.usage") or 0) / 1e9
        return _field(self.paths["tree"], "cpu.stat", "usage_usec") / 1e6 if "tree" in self.paths else 0.0

    def remove(self) -> bool:
        """False while a dying process still holds the group: ask again."""
        gone = True
        for path in self.paths.values():
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
        return gone


def find(name: str) -> Group | None:
    """Make the spawner's own group `name` where controllers for memory and processes work, or None."""
    v1, v2 = hierarchies(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    tree = v2[1] if v2 else None
    candidates: list[dict[str, str]] = []
    if {"memory", "pids"} <= v1.keys():
        paths = {kind: f"{v1[kind]}/{name}" for kind in _V1 if kind in v1}
        candidates += [paths | {"tree": f"{tree}/{name}"}] if tree else []
        candidates.append(paths)
    if v2:
        mount, own = v2
        for place in _upwards(own, mount):
            if set(_V2) <= set(_read(place, "cgroup.subtree_control").split()):
                candidates.append({"tree": f"{place}/{name}"})
    for paths in candidates:
        group = Group(paths)
        if _works(group):
            return group
    return None


def sweep(paths: dict[str, str]) -> None:
    """Kill what still runs in the groups of a spawner that is gone, and remove them. `paths` come from its owner record."""
    for path in paths.values():
        children = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)] if os.path.isdir(path) else []
        for directory in [*children, path]:
            for _ in range(50):
                _kill_members(directory)
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
                if not os.path.isdir(directory):
                    break
                time.sleep(0.01)


def _kill_members(directory: str) -> None:
    for pid in map(int, _read(directory, "cgroup.procs").split()):
        if pid > 0:  # 0 stands for a process outside this process namespace, and means one's own group to kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def _works(group: Group) -> bool:
    """Whether a child group with limits can be made and entered."""
    probe = Group({kind: f"{path}/probe" for kind, path in group.paths.items()})
    try:
        for path in group.paths.values():
            os.mkdir(path)
        if "memory" not in group.paths:
            _write(group.paths["tree"], "cgroup.subtree_control", "+memory +pids")
            _write_if_present(group.paths["tree"], "cgroup.subtree_control", "+cpu")
        group.child("probe").limit(64 << 20, 8)
        pid = os.fork()
        if pid == 0:
            try:
                probe.join()
            except OSError:
                os._exit(1)
            os._exit(0)
        works = os.waitpid(pid, 0)[1] == 0
    except OSError:
        works = False
    probe.remove()
    if not works:
        group.remove()
    return works


def hierarchies(groups: str, mounts: str) -> tuple[dict[str, str], tuple[str, str] | None]:
    """From /proc/self/cgroup and /proc/self/mountinfo: version 1 as controller → directory of this process's group, version 2 as
    (mount point, directory of this process's group)."""
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(",") if controllers else ["unified"], path))
    v1: dict[str, str] = {}
    v2: tuple[str, str] | None = None
    for line in mounts.splitlines():
        left, right = line.split(" - ", 1)
        root, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2" and "unified" in own:
            v2 = (point, _below(point, root, own["unified"]))
        elif kind == "cgroup":
            for controller in set(options.split(",")) & own.keys():
                v1[controller] = _below(point, root, own[controller])
    return v1, v2


def _below(point: str, root: str, path: str) -> str:
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    return (point + "/" + inside.strip("/")).rstrip("/")


def _upwards(path: str, top: str) -> list[str]:
    places = [path]
    while path != top and path.startswith(top):
        path = path.rsplit("/", 1)[0]
        places.append(path)
    return places


def _write(directory: str, name: str, value: int | str) -> None:
    fd = os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _write_if_present(directory: str, name: str, value: int | str) -> bool:
    try:
        _write(directory, name, value)
    except OSError:
        return False
    return True


def _read(directory: str, name: str) -> str:
    try:
        with open(f"{directory}/{name}") as file:
            return file.read()
    except OSError:
        return ""


def _field(directory: str, name: str, key: str) -> int:
    for line in _read(directory, name).splitlines():
        word, _, value = line.partition(" ")
        if word == key:
            return int(value)
    return 0
