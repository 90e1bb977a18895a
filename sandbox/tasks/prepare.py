"""Task directories of a run: generated or copied into `tasks/<split>/`, checked, and listed in `index.jsonl`."""

from __future__ import annotations

import functools
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sandbox.environments.images.registry import is_reference
from sandbox.integrity import hidden
from sandbox.integrity.gitview import HistoryError, hide
from server.schemas.rundir import write_atomic
from server.schemas.runspec import Data
from server.schemas.tasks import HELD_OUT, TRAIN, TaskEntry

from .onebug import generate

INDEX = "index.jsonl"


class TaskError(Exception):
    """A task directory that trials cannot use; the message says what to change in it."""


def prepare(data: Data, tasks: Path, limit: int | None = None) -> dict[str, list[TaskEntry]]:
    """Write both splits below `tasks` and return their entries. A split whose index exists is taken as it is: it was written last.

    `limit` bounds the tasks of a split that come from a directory.
    """
    return {split: _read(tasks / split) or _write(data, split, tasks / split, limit) for split in (TRAIN, HELD_OUT)}


def _read(directory: Path) -> list[TaskEntry]:
    index = directory / INDEX
    return [TaskEntry.model_validate_json(line) for line in index.read_text().splitlines()] if index.exists() else []


def _write(data: Data, split: str, directory: Path, limit: int | None) -> list[TaskEntry]:
    directory.mkdir(parents=True, exist_ok=True)
    entries = list(_generate(data, split, directory) if data.family else _copy(data, split, directory, limit))
    if not entries and split == TRAIN:
        raise TaskError(f"data.train: {data.train} holds no task directory")
    write_atomic(directory / INDEX, "".join(entry.model_dump_json() + "\n" for entry in entries), mode=0o644)
    return entries


def _generate(data: Data, split: str, directory: Path) -> Iterator[TaskEntry]:
    held_out = split == HELD_OUT
    for task in generate(data.seed, data.held_out_tasks if held_out else data.train_tasks, held_out):
        _place(directory / task.name, task.write)
        yield TaskEntry(task=task.name, kind=task.kind, instruction=task.issue)


def _copy(data: Data, split: str, directory: Path, limit: int | None) -> Iterator[TaskEntry]:
    source = data.held_out if split == HELD_OUT else data.train
    if source is None:
        return
    if not source.is_dir():
        raise TaskError(f"data.{split}: {source} is not a directory")
    for task in _chosen(source)[:limit]:
        entry = check_task(task)
        _place(directory / task.name, functools.partial(_take, task))
        yield entry


def _chosen(source: Path) -> list[Path]:
    """The tasks of a directory: those that its index names, where it has one (`rl purge` writes it), else all, by name."""
    if (source / INDEX).exists():
        return [source / entry.task for entry in _read(source)]
    return sorted(path for path in source.iterdir() if path.is_dir())


def _take(task: Path, target: Path) -> None:
    """Copy a task; a repository in its tree becomes one commit, see `gitview`."""
    shutil.copytree(task, target, symlinks=True)
    try:
        hide(target)
    except HistoryError as error:
        raise TaskError(str(error)) from error


def _place(path: Path, write: Callable[[Path], object]) -> None:
    """Write a directory whole or not at all; one that exists is kept."""
    if not path.exists():
        unfinished = path.with_name(f".writing-{path.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        write(unfinished)
        unfinished.rename(path)


def check_task(task: Path) -> TaskEntry:
    """The entry of a task directory in Harbor's format; raises TaskError when this runner cannot execute and grade it."""
    required = {
        "task.toml": "it describes the task",
        "instruction.md": "it is what the agent is told",
    }
    for name, why in required.items():
        if not (task / name).exists():
            raise TaskError(f"task {task}: {name} is missing; {why}")
    if not (task / "tests" / "check.py").exists() and not any(task.glob("tests/**/test_*.py")):
        raise TaskError(
            f"task {task}: tests/check.py is missing, the plain Python program that decides (exit status 0: solved), and so are "
            "hidden pytest tests (tests/test_*.py); other graders cannot be run yet"
        )
    try:
        hidden.look(task)
    except hidden.NoTests as error:
        raise TaskError(f"{error}") from error
    try:
        config = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"task {task}: task.toml cannot be read: {error}") from error
    _check_tree(task, config.get("environment", {}))
    if config.get("steps"):
        raise TaskError(f"task {task}: tasks with [[steps]] cannot be run yet")
    if config.get("verifier", {}).get("environment_mode") != "separate":
        raise TaskError(f'task {task}: set environment_mode = "separate" under [verifier]; a grader in the agent\'s sandbox can be cheated')
    metadata = config.get("metadata", {})
    try:
        return TaskEntry(
            task=task.name,
            kind=metadata.get("kind", ""),
            instruction=(task / "instruction.md").read_text(encoding="utf-8"),
            harness=metadata.get("harness"),
        )
    except ValidationError as error:
        raise TaskError(f"task {task}: {error.errors()[0]['msg']} ({error.errors()[0]['loc'][0]})") from error


def _check_tree(task: Path, environment: dict[str, Any]) -> None:
    """The tree that the agent starts from is one of the task's directories, or one of its image. A task may name no directory of ours."""
    if (image := environment.get("docker_image")) and not is_reference(image):
        raise TaskError(f"task {task}: docker_image {image!r} is no image of a registry: write NAME:TAG or NAME@sha256:…")
    if (task / "environment" / "workspace").exists():
        return
    if not environment.get("docker_image") and not (task / "environment" / "Dockerfile").exists():
        raise TaskError(f"task {task}: environment/workspace is missing; it is the tree that the agent starts from")
    if not environment.get("workdir"):
        raise TaskError(
            f"task {task}: environment/workspace is missing, so the tree that the agent starts from must be in the image: set workdir "
            "under [environment] to its place there"
        )
