"""Whole runs: a data directory with installed harness runtimes, `rl` as a process, and the record that a run left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from plugin.client import Client
from plugin.local import running
from server.db import Database
from server.schemas.datadir import DataDir

RUNTIMES = Path.home() / ".cache" / "lego-rl-tests" / "runtimes"
"""Downloads are kept between test runs; what is installed there is checked like any other store."""


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDir]:
    """A data directory of its own. Whatever still runs on it afterwards is a leak: it is ended and fails the test."""
    data = DataDir(tmp_path / "data")
    data.root.mkdir()
    RUNTIMES.mkdir(parents=True, exist_ok=True)
    data.runtimes.symlink_to(RUNTIMES)
    yield data
    rl(data, "down")
    left = processes_on(data)
    for process in left:
        process.kill()
    assert not left, f"still running: {[process.cmdline() for process in left]}"


@contextmanager
def real_server(data: DataDir) -> Iterator[Client]:
    """The control plane as `rl up` starts it, over a data directory that has mini-swe-agent."""
    RUNTIMES.mkdir(parents=True, exist_ok=True)
    data.runtimes.symlink_to(RUNTIMES)
    assert rl(data, "harness", "install", "mini-swe-agent").returncode == 0
    assert rl(data, "up", "--port", "0").returncode == 0
    client = running(data)
    assert client is not None
    try:
        yield client
    finally:
        client.close()
        rl(data, "down")


def rl(data: DataDir, *arguments: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("rl")), "--data-dir", str(data.root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def processes_on(data: DataDir) -> list[psutil.Process]:
    """Processes that name the directory in their arguments or work in it; those that are just ending get a moment."""

    def belongs(process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return str(data.root) in " ".join(process.cmdline()) or process.cwd().startswith(str(data.root))
        except psutil.Error:
            return False

    end = time.monotonic() + 60
    while True:
        left = [process for process in psutil.process_iter() if belongs(process)]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)


def record(data: DataDir) -> Database:
    return Database(f"sqlite:///{data.database}")


def last_json(output: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(output.strip().splitlines()[-1])
    return found
