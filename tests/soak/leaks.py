"""What is left when everything was ended, and how memory went while it ran."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .kills import groups, spawners

FIRST_UID = 61000
"""Of agents in rootful sandboxes."""
_KINDS = ("mnt", "net", "pid", "ipc", "uts", "user", "cgroup")


@dataclass
class Watch:
    """Everything of ours that was ever seen while trials ran."""

    sandboxes: Path
    processes: dict[int, float] = field(default_factory=dict)
    """Pid → start time."""
    namespaces: set[tuple[str, int]] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    runners: set[int] = field(default_factory=set)
    host: set[tuple[str, int]] = field(default_factory=lambda: _namespaces(os.getpid()))
    mounts: set[str] = field(default_factory=lambda: _mounts())
    scratch: set[Path] = field(default_factory=lambda: set(Path("/tmp").iterdir()))  # noqa: S108

    def look(self, runner: int) -> None:
        self.runners.add(runner)
        for spawner in spawners(runner):
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(spawner)
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self.processes[process.pid] = process.create_time()
                        self.namespaces |= _namespaces(process.pid) - self.host
        for group in groups(self.sandboxes):
            self.groups.add(group)
            self.groups.update(str(path) for path in Path(group).glob("*") if path.is_dir())
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(runner).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.processes[process.pid] = process.create_time()

    def left(self) -> dict[str, list[str]]:
        """What is still there, by kind; call when the runner has ended. The kernel gives numbers of namespaces again, so those of others
        that were made since do not count."""
        ours = [pid for pid, started in self.processes.items() if _runs(pid, started)] + _orphans()
        inhabited = {ns for pid in ours for ns in _namespaces(pid)}
        return {
            "processes": [str(pid) for pid in ours],
            "namespaces": [f"{kind}:{number}" for kind, number in sorted(self.namespaces & inhabited)],
            "cgroups": sorted(group for group in self.groups if Path(group).is_dir()),
            "mounts": sorted(line for line in _mounts() - self.mounts if "lego-rl-" in line or str(self.sandboxes) in line),
            "state": sorted(str(path) for path in self.sandboxes.glob("*") if self.sandboxes.is_dir()),
            "files": sorted(str(path) for path in set(Path("/tmp").iterdir()) - self.scratch if self._ours(path)),  # noqa: S108
        }

    def _ours(self, path: Path) -> bool:
        """Left by one of our runners; the next one removes it, so the last one's at most may be there."""
        owner = path.name.removeprefix("lego-warm-").partition("-")[0]
        return owner.isdigit() and int(owner) in self.runners


@dataclass
class Memory:
    """Samples of the runner since it began: (trials that ended in it, resident bytes, descriptors, threads)."""

    boots: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    idle_fds: tuple[int, int] = (0, 0)
    """Descriptors of the last runner: when its first trials had ended, and when everything was over. Zeros when it saw none end."""

    def look(self, pid: int, ended: int) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    return
                sample = (ended, process.memory_info().rss, process.num_fds(), process.num_threads())
            self.boots.setdefault(pid, []).append(sample)

    def end(self, pid: int) -> None:
        samples = self.boots.get(pid, [])
        at_work = [fds for ended, _, fds, _ in samples if ended > samples[0][0]]
        if at_work:
            with contextlib.suppress(psutil.Error):
                self.idle_fds = (at_work[0], psutil.Process(pid).num_fds())

    def slopes(self, warm: int) -> list[dict[str, float]]:
        """Of each boot with enough trials behind its first `warm`: bytes per trial, by least squares."""
        found = []
        for samples in self.boots.values():
            after = [sample for sample in samples if sample[0] - samples[0][0] >= warm]
            if len(after) < 5 or after[-1][0] - after[0][0] < warm:
                continue
            trials = [float(sample[0]) for sample in after]
            found.append(
                {
                    "trials": trials[-1] - trials[0],
                    "bytes_per_trial": round(_slope(trials, [float(sample[1]) for sample in after])),
                    "mb": round(after[-1][1] / 2**20, 1),
                    "fds": float(after[-1][2]),
                    "threads": float(after[-1][3]),
                }
            )
        return found


def _slope(xs: list[float], ys: list[float]) -> float:
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((value - x) ** 2 for value in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else 0.0


def _namespaces(pid: int) -> set[tuple[str, int]]:
    found = set()
    for kind in _KINDS:
        with contextlib.suppress(OSError):
            found.add((kind, Path(f"/proc/{pid}/ns/{kind}").stat().st_ino))
    return found


def _orphans() -> list[int]:
    """Processes of sandboxes that nobody is the parent of any more."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "uids"]):
        uids = process.info["uids"]
        if process.info["ppid"] == 1 and uids and FIRST_UID <= uids.real < FIRST_UID + 1000:
            found.append(process.info["pid"])
    return found


def _mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


def _runs(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 0.1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
