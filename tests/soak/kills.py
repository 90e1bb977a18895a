"""Seeded kills of real processes: found by the cgroups of our own spawners, never by name."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

_GRADER = "The grader's half"
_SPAWNER = "sandbox.environments.namespace.spawner"


class Kill(StrEnum):
    AGENT = "agent"
    """A process of the harness or of its tools."""
    VERIFIER = "verifier"
    """A process of a grader that is at work: its monitor, the check, or what the check runs."""
    SANDBOX = "sandbox"
    """Process 1 of any sandbox."""
    SPAWNER = "spawner"
    RUNNER = "runner"


WEIGHTS = {Kill.AGENT: 12, Kill.VERIFIER: 12, Kill.SANDBOX: 3, Kill.SPAWNER: 1, Kill.RUNNER: 1}


def schedule(rng: random.Random, count: int) -> list[Kill]:
    """`count` kills, at least one of each kind."""
    kinds = list(Kill)
    kills = [*kinds, *rng.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds], k=max(0, count - len(kinds)))]
    rng.shuffle(kills)
    return kills


@dataclass(frozen=True)
class Done:
    kind: Kill
    pid: int
    at: float
    """Unix seconds."""


def kill(kind: Kill, runner: int, sandboxes: Path, rng: random.Random) -> Done | None:
    """SIGKILL to one process of that kind; None when there is none just now."""
    victims = {
        Kill.RUNNER: lambda: [runner],
        Kill.SPAWNER: lambda: spawners(runner),
        Kill.SANDBOX: lambda: [first for first, _, _ in _sandboxes(runner, sandboxes)],
        Kill.AGENT: lambda: [pid for first, pids, grading in _sandboxes(runner, sandboxes) if not grading for pid in pids if pid != first],
        Kill.VERIFIER: lambda: [pid for first, pids, grading in _sandboxes(runner, sandboxes) if grading for pid in pids if pid != first],
    }[kind]()
    if not victims:
        return None
    pid = rng.choice(victims)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Done(kind, pid, time.time())


def spawners(runner: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(runner).children() if _SPAWNER in " ".join(_line(child))]
    return []


def groups(sandboxes: Path) -> list[str]:
    """Cgroup directories of the spawners whose state lies in `sandboxes`."""
    found = []
    for record in sandboxes.glob("lego-rl-*/owner.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found += list(json.loads(record.read_text())["cgroups"].values())
    return found


def _sandboxes(runner: int, sandboxes: Path) -> Iterator[tuple[int, list[int], bool]]:
    """Of each sandbox: process 1, all processes, whether a grader is among them."""
    parents = set(spawners(runner))
    for group in groups(sandboxes):
        if not Path(group, "cgroup.kill").exists():
            continue  # one hierarchy of several is enough
        for members in Path(group).glob("*/cgroup.procs"):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                pids = [int(line) for line in members.read_text().split()]
                first = next((pid for pid in pids if psutil.Process(pid).ppid() in parents), 0)
                if first:
                    yield first, pids, any(_GRADER in " ".join(_line(psutil.Process(pid))) for pid in pids)


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
