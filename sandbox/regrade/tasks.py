"""The tasks of a run as they are to be graded now: the tree that the agents were given, with today's tests."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from sandbox.tasks.lean import digest
from server.schemas.runspec import Data
from server.schemas.tasks import TRAIN

_INTEGRITY = Path(__file__).parents[1] / "integrity"


class NoTask(Exception):
    """The run's directory no longer has a task."""


def current_task(kept: Path, data: Data, split: str, into: Path) -> Path:
    """A copy of the run's task `kept` below `into`, whose tests are those of the directory that the run's spec names, if it still has them.

    The tree stays the one that the diffs were made against.
    """
    if not (kept / "task.toml").is_file():
        raise NoTask(f"the run's directory has no task {kept.name} any more: {kept}")
    task = into / split / kept.name
    shutil.copytree(kept, task, symlinks=True)
    source = data.train if split == TRAIN else data.held_out
    if source is not None and (source / kept.name / "tests").is_dir():
        shutil.rmtree(task / "tests")
        shutil.copytree(source / kept.name / "tests", task / "tests", symlinks=True)
    return task


def inputs(task: Path, diff_sha256: str, verifier: str) -> str:
    """The SHA-256 that names a verdict: the same diff, task, verifier and grader need no second look."""
    programs = hashlib.sha256()
    for path in sorted(_INTEGRITY.glob("*.py")):
        programs.update(path.read_bytes())
    return hashlib.sha256(f"{verifier}\0{diff_sha256}\0{digest(task)}\0{programs.hexdigest()}".encode()).hexdigest()
