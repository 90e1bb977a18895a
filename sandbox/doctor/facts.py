"""What a machine shows about its sandboxes. Reading only: nothing is signalled, entered or removed here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

import psutil

from sandbox.environments.backend import backends
from sandbox.environments.images.cache import ImageCache
from sandbox.environments.namespace.cgroups import hierarchies
from server.schemas.datadir import DataDir

MARK = "lego-rl-"
"""Every spawner's state directory and cgroup is named so."""
_SPAWNER, _RUNNER = "sandbox.environments.namespace.spawner", "sandbox.runner"


@dataclass(frozen=True)
class StartTrend:
    """Median seconds to set a sandbox up, in the first and in the last quarter of a run's trials."""

    run: str
    trials: int
    first_s: float
    last_s: float


@dataclass(frozen=True)
class Facts:
    abandoned: list[Path] = field(default_factory=list)
    """State directories whose spawner is gone."""
    groups: list[str] = field(default_factory=list)
    """Cgroups of spawners that are gone."""
    group_processes: int = 0
    """Processes that still run in them."""
    mounts: list[str] = field(default_factory=list)
    """Mounts of sandboxes in the machine's own mount namespace, where they never belong."""
    elsewhere: list[str] = field(default_factory=list)
    """Owners that are gone and may have left containers or pods, as the backends tell."""
    namespaces: int = 0
    """Mount namespaces with a process in them: every sandbox has one."""
    spawners: list[int] = field(default_factory=list)
    """Process ids of spawners whose owner is gone."""
    cgroups: int = 0
    """Memory cgroups of the whole machine."""
    percpu_mb: float = 0
    """Memory that the kernel holds per CPU: it grows with cgroups that were never freed."""
    disk: tuple[float, float] = (0, 0)
    """Of the data directory: used share, free GB."""
    shared_memory: float = 0
    """Used share of /dev/shm."""
    images: tuple[int, float, float] = (0, 0, 0)
    """In the image cache: their number, GB of their layers, GB that an interrupted fetch left."""
    trends: list[StartTrend] = field(default_factory=list)


def state_bases(runs: Path) -> list[Path]:
    """Where runners and regrades of the runs keep the state of their sandboxes."""
    return sorted([*runs.glob("*/sandboxes"), *runs.glob("*/regrade/sandboxes")])


def gather(runs: Path, trends: bool = True) -> Facts:
    """The facts of this machine and of the runs below `runs`. Trends read one file for each trial that there ever was."""
    bases = state_bases(runs)
    abandoned = [state for base in bases for state in sorted(base.glob(f"{MARK}*")) if not _locked(state)]
    groups = _groups_of({state.name for state in abandoned}) + _groups_without_owner(
        {state.name for base in bases for state in base.iterdir()}
    )
    usage = shutil.disk_usage(_existing(runs))
    shared = shutil.disk_usage("/dev/shm")  # noqa: S108
    images = ImageCache(DataDir(runs.parent).images)
    return Facts(
        abandoned=abandoned,
        groups=groups,
        group_processes=sum(len(_text(f"{group}/cgroup.procs").split()) for group in groups),
        mounts=[line.split()[4] for line in _text("/proc/self/mountinfo").splitlines() if f"/{MARK}" in line.split()[4]],
        elsewhere=[left for base in bases for backend in backends().values() for left in backend.abandoned(base)],
        namespaces=_mount_namespaces(),
        spawners=_orphans(),
        cgroups=_number(r"^memory\s+\d+\s+(\d+)", _text("/proc/cgroups")),
        percpu_mb=_number(r"^Percpu:\s+(\d+)", _text("/proc/meminfo")) / 1024,
        disk=(usage.used / usage.total, usage.free / 1e9),
        shared_memory=shared.used / shared.total if shared.total else 0,
        images=(len(images.images()), images.used_bytes() / 1e9, images.left_bytes() / 1e9),
        trends=[trend for run in sorted(runs.glob("*")) if (trend := start_trend(run)) is not None] if trends else [],
    )


def start_trend(run: Path) -> StartTrend | None:
    """From the results that Harbor keeps with every trial; None for fewer than eight."""
    spans: list[tuple[str, float]] = []
    for result in run.glob("trials/*/result.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stage = json.loads(result.read_bytes())["environment_setup"]
            begun, ended = (datetime.fromisoformat(stage[name]) for name in ("started_at", "finished_at"))
            spans.append((stage["started_at"], (ended - begun).total_seconds()))
    if len(spans) < 8:
        return None
    seconds = [length for _, length in sorted(spans)]
    quarter = len(seconds) // 4
    return StartTrend(run.name, len(seconds), round(median(seconds[:quarter]), 3), round(median(seconds[-quarter:]), 3))


def _locked(state: Path) -> bool:
    """Whether a living spawner holds the record of its state directory."""
    try:
        record = os.open(state / "owner.json", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(record)
    return False


def _places() -> list[Path]:
    v1, v2 = hierarchies(_text("/proc/self/cgroup"), _text("/proc/self/mountinfo"))
    return [Path(path) for path in dict.fromkeys([*v1.values(), *([v2[1]] if v2 else [])])]


def _groups_of(names: set[str]) -> list[str]:
    return [str(place / name) for place in _places() for name in sorted(names) if (place / name).is_dir()]


def _groups_without_owner(known: set[str]) -> list[str]:
    """Empty groups of spawners that we know nothing of: whoever made them left nothing in them."""
    found = []
    for place in _places():
        for group in sorted(place.glob(f"{MARK}*")):
            members = [member for path in (group, *group.glob("*")) if path.is_dir() for member in _text(f"{path}/cgroup.procs").split()]
            if group.name not in known and not members and not _alive_elsewhere(group.name):
                found.append(str(group))
    return found


def _alive_elsewhere(name: str) -> bool:
    """Whether a spawner with this state directory runs, for another run or another user."""
    return any(name in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def _orphans() -> list[int]:
    """Spawners whose runner is gone. In a container the runner itself may be process 1, which adopts nobody that it did not start."""
    spawners = [process for process in psutil.process_iter(["pid", "ppid"]) if _runs(process, _SPAWNER)]
    return [process.info["pid"] for process in spawners if process.info["ppid"] == 1 and not _runs(psutil.Process(1), _RUNNER)]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in " ".join(process.cmdline())
    except psutil.Error:  # gone, or another user's
        return False


def _mount_namespaces() -> int:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            found.add((process / "ns" / "mnt").stat().st_ino)
    return len(found)


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text, re.MULTILINE)
    return int(match[1]) if match else 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
