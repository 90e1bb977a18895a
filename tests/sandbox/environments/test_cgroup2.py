"""Version 2 of cgroups alone, as far as a machine with both allows: real groups on the real version 2 mount with whatever controller is
bound there, and the files of `memory` and `pids` as kernel 6.1 writes them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.environments.namespace.cgroups import Group, Usage, find, hierarchies

THREADED = ("cpu", "cpuset", "perf_event", "pids")


@pytest.fixture
def place() -> Iterator[Path]:
    """A group of ours on the version 2 mount."""
    _, v2 = hierarchies(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    if v2 is None:
        pytest.skip("no cgroup version 2 is mounted here")
    path = Path(v2[0]) / f"lego-rl-test-{os.urandom(4).hex()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made in {v2[0]}: {error.strerror}")
    yield path
    for child in [*path.glob("*/*/cgroup.procs"), *path.glob("*/cgroup.procs")]:
        child.parent.rmdir()
    path.rmdir()


def test_groups_of_sandboxes_are_leaves_and_the_spawners_own_holds_no_process(place: Path) -> None:
    """The kernel lets no group have both processes and controllers below it. The spawner's own group has the controllers; the sandboxes'
    have the processes, and nothing is enabled in them. It does not mind controllers that could tell threads apart."""
    controllers = [name for name in (place / "cgroup.controllers").read_text().split() if name not in THREADED]
    sandbox = Group({"tree": str(place)}).child("0")
    child = subprocess.Popen(["sleep", "60"])
    try:
        if controllers:
            (place / "cgroup.subtree_control").write_text(f"+{controllers[0]}")
            with pytest.raises(OSError):
                (place / "cgroup.procs").write_text(str(child.pid))
        (place / "0" / "cgroup.procs").write_text(str(child.pid))
        assert (place / "0" / "cgroup.subtree_control").read_text().strip() == ""
        if controllers:
            with pytest.raises(OSError):
                (place / "0" / "cgroup.subtree_control").write_text(f"+{controllers[0]}")
        assert not sandbox.remove()
        assert sandbox.kill()
        assert child.wait(60) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while not sandbox.remove():
            assert time.monotonic() < deadline
        assert sandbox.remove()
    finally:
        child.kill()
        child.wait()


BOMB = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def test_a_fork_bomb_outside_its_session_dies_with_its_group(place: Path) -> None:
    sandbox = Group({"tree": str(place)}).child("0")
    process = subprocess.Popen(["python3", "-c", BOMB])
    (place / "0" / "cgroup.procs").write_text(str(process.pid))
    while len((place / "0" / "cgroup.procs").read_text().split()) < 30:
        time.sleep(0.02)
    assert sandbox.kill()
    process.wait(60)
    deadline = time.monotonic() + 60
    while not sandbox.remove():
        assert time.monotonic() < deadline, (place / "0" / "cgroup.procs").read_text()


def test_limits_and_counters_are_those_of_version_2(tmp_path: Path) -> None:
    """Recorded on Linux 6.1 with version 2 alone: a sandbox with one process killed at its limit and two forks refused."""
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (tmp_path / name).touch()
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n")
    (tmp_path / "memory.peak").write_text("268435456\n")
    (tmp_path / "pids.events").write_text("max 2\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n")
    group = Group({"tree": str(tmp_path)})
    group.limit(256 << 20, 33)
    written = [(tmp_path / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")]
    assert written == [str(256 << 20), "0", "33"]
    assert group.usage() == Usage(cpu_s=1.5, memory_peak=256 << 20, out_of_memory=1, process_limit_hits=2)


def test_no_group_without_memory_and_processes() -> None:
    """What is bound to version 2 here may be nothing of use: then limits come from version 1, or from rlimits."""
    name = f"lego-rl-test-{os.urandom(4).hex()}"
    group = find(name)
    if group is None:
        return
    try:
        assert "memory" in group.paths or "memory" in (Path(group.paths["tree"]) / "cgroup.controllers").read_text()
    finally:
        assert group.remove()
