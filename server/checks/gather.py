"""Gathering facts: this process looks at the machine, the rooms' own interpreters look at the rooms. Every question has a deadline."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import psutil

from ..runs.plans import is_directory, named_paths
from ..schemas.probes import ClusterFacts, DeviceFacts, HarnessRuntime, ModelFacts, SelfTestFacts
from ..schemas.runspec import RunSpec
from ..settings import Settings
from .facts import Answer, Facts, PathFact
from .rooms import Rooms

MODEL_S = 60
DEVICE_S = 60
HARNESS_S = 60
SELFTEST_S = 240
CLUSTER_S = 90
SAMPLED_TASKS = 2


def gather(settings: Settings, spec: RunSpec, rooms: Rooms, *, skip_slow: bool) -> Facts:
    """Everything that the rules need; questions to the rooms are asked at the same time. Of a run in a cluster, what this machine's rooms
    say of model, harnesses and sandboxes means nothing."""
    pins = pinned()
    inside = spec.trainer.launcher == "kubernetes"
    with tempfile.TemporaryDirectory(prefix="lego-rl-check-") as directory, ThreadPoolExecutor(max_workers=4) as pool:
        file = Path(directory) / "spec.json"
        file.write_text(spec.model_dump_json())
        trainer_cli = [str(settings.trainer_python), "-P", "-m", "trainer.cli"]
        sandbox_cli = [str(settings.sandbox_python), "-P", "-m", "sandbox.cli"]
        trainer = pool.submit(rooms.versions, settings.trainer_python, list(pins["trainer"]))
        sandbox = pool.submit(rooms.versions, settings.sandbox_python, list(pins["sandbox"]))
        answers: dict[str, Future[Answer[Any]]] = {}
        if inside:
            answers["cluster"] = pool.submit(
                rooms.ask, ClusterFacts, [*trainer_cli, "check-cluster", "--spec", str(file), "--json"], CLUSTER_S
            )
        else:
            answers["model"] = pool.submit(rooms.ask, ModelFacts, [*trainer_cli, "check-model", "--spec", str(file), "--json"], MODEL_S)
            if spec.trainer.device == "cuda":
                asked = [*trainer_cli, "check-device", "--spec", str(file), "--json"]
                answers["device"] = pool.submit(rooms.ask, DeviceFacts, asked, DEVICE_S)
            listing = ["harness", "list", "--runtimes", str(settings.data.runtimes), "--json"]
            answers["harnesses"] = pool.submit(rooms.ask, list[HarnessRuntime], [*sandbox_cli, *listing], HARNESS_S)
        selftest: Answer[SelfTestFacts] | None = None
        if not skip_slow and not inside:
            tasks = ["selftest", "--spec", str(file), "--tasks", str(SAMPLED_TASKS), "--json"]
            selftest = rooms.ask(SelfTestFacts, [*sandbox_cli, *tasks], SELFTEST_S)
        return Facts(
            data_dir=settings.data_dir,
            data=_path(settings.data_dir),
            paths={name: _path(path) for name, path in named_paths(spec).items()},
            bind_problem=_bind_problem(),
            memory_mb=_memory_mb(),
            disk_mb=shutil.disk_usage(settings.data_dir).free >> 20,
            cpus=len(os.sched_getaffinity(0)),
            trainer=trainer.result(),
            sandbox=sandbox.result(),
            pins=pins,
            selftest=selftest,
            listens=settings.url,
            loopback=settings.is_loopback,
            hostnames=settings.hostnames,
            **{name: answer.result() for name, answer in answers.items()},
        )


def pinned() -> dict[str, dict[str, str]]:
    """Exact versions that the package's own metadata demands: extra → package → version."""
    found: dict[str, dict[str, str]] = {"trainer": {}, "sandbox": {}}
    for requirement in requires("lego-rl") or []:
        match = re.match(r"""([\w.-]+)==([^;\s]+)\s*;.*extra == ['"](\w+)['"]""", requirement)
        if match and match[3] in found:
            found[match[3]][match[1]] = match[2]
    return found


def _path(path: Path) -> PathFact:
    try:
        exists = path.exists()
    except OSError:
        exists = False
    return PathFact(exists=exists, is_dir=is_directory(path), writable=_is_writable(path))


def _is_writable(path: Path) -> bool:
    """By trying: access bits say nothing about a read-only file system."""
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


def _bind_problem() -> str:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
    except OSError as error:
        return str(error)
    return ""


def _memory_mb() -> int:
    available = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # no control group of version 2 here: the machine's figure stands
    return available >> 20
