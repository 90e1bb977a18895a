"""From an index and what runs say to what goes, with why; applied as a whole or not at all, and undone from its manifest.

An index is the file `index.jsonl` of a directory of tasks, one `TaskEntry` a line. A directory without one stands for all its tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox.tasks.prepare import INDEX, TaskError, check_task
from server.schemas.outcome import Cause
from server.schemas.rundir import write_atomic
from server.schemas.tasks import TaskEntry
from server.schemas.tasks_record import TaskRecord, TaskTrial

OF_THE_TASK = (Cause.IMAGE, Cause.SANDBOX_SETUP, Cause.VERIFIER, Cause.VERIFIER_TIMEOUT)
"""Causes that a task may bring about: its image, its tree, its tests. The others are of machines, harnesses and engines."""
MOST = 0.5
"""When more of an index than this looks broken, it is rather the machine."""
_MANIFEST = ".purged.json"


class PurgeError(Exception):
    """The index cannot be purged, or a purge cannot be undone; the message says why."""


class Removed(BaseModel):
    """`at` counts lines from 0 in the index before."""

    model_config = ConfigDict(extra="forbid")

    at: int
    line: str
    why: str
    evidence: list[TaskTrial]


class Manifest(BaseModel):
    """What a purge took out of an index. `before` is None where there was no file: the directory itself was the index."""

    model_config = ConfigDict(extra="forbid")

    index: Path
    before: str | None
    """SHA-256 of the index before, whose content is kept in the file `kept`."""
    after: str
    kept: Path | None
    removed: list[Removed]

    @property
    def path(self) -> Path:
        return self.index.with_name(f"{self.index.name}.{self.after[:8]}{_MANIFEST}")


def read(index: Path) -> list[str]:
    """The lines of an index, or those that the directory would have. Raises PurgeError."""
    place = index / INDEX if index.is_dir() else index
    try:
        if place.exists():
            lines = [line for line in place.read_text().splitlines() if line.strip()]
        else:
            lines = [check_task(task).model_dump_json() for task in sorted(path for path in index.iterdir() if path.is_dir())]
    except (OSError, TaskError, UnicodeDecodeError) as error:
        raise PurgeError(f"{place} is no index of tasks: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            TaskEntry.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = f" ({'.'.join(map(str, first['loc']))})" if first["loc"] else ""
            raise PurgeError(f"{place} is no index of tasks: task {number} of it: {first['msg']}{where}") from error
    return lines


def task_of(line: str) -> str:
    return TaskEntry.model_validate_json(line).task


def broken(record: TaskRecord, at_least: int, share: float) -> str:
    """Why a task is to go, empty when it stays."""
    counts = {cause: count for cause, count in record.failed.items() if cause in OF_THE_TASK}
    total = sum(counts.values())
    if record.trials < at_least or not total or total < share * record.trials:
        return ""
    words = ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items()))
    return f"{total} of {record.trials} trials failed: {words}"


def plan(index: Path, lines: Sequence[str], records: Mapping[str, TaskRecord], at_least: int, share: float) -> Manifest:
    """What a purge would do. Writes nothing."""
    removed = []
    for number, line in enumerate(lines):
        record = records.get(task_of(line))
        if record is not None and (why := broken(record, at_least, share)):
            evidence = [trial for trial in record.examples if trial.cause in OF_THE_TASK]
            removed.append(Removed(at=number, line=line, why=why, evidence=evidence))
    gone = {entry.at for entry in removed}
    place = index / INDEX if index.is_dir() else index
    before = _digest(place.read_bytes()) if place.exists() else None
    kept = place.with_name(f"{place.name}.{before[:8]}.before") if before else None
    after = _digest(_text([line for number, line in enumerate(lines) if number not in gone]))
    return Manifest(index=place.absolute(), before=before, after=after, kept=kept.absolute() if kept else None, removed=removed)


def apply(manifest: Manifest, lines: Sequence[str]) -> None:
    """Keep the index as it was, write the manifest, then the new index: each atomic, and whatever happens in between can be undone.

    Raises PurgeError when the index has changed since the plan.
    """
    present = _digest(manifest.index.read_bytes()) if manifest.index.exists() else None
    if present != manifest.before:
        raise PurgeError(f"{manifest.index} has changed meanwhile: run the command again")
    gone = {entry.at for entry in manifest.removed}
    if manifest.kept is not None:
        write_atomic(manifest.kept, manifest.index.read_bytes(), mode=0o644)
    write_atomic(manifest.path, manifest.model_dump_json(indent=2) + "\n", mode=0o644)
    write_atomic(manifest.index, _text([line for number, line in enumerate(lines) if number not in gone]), mode=0o644)


def undo(path: Path) -> Manifest:
    """Put the index back as the manifest says it was. Raises PurgeError; nothing happens when it is back already."""
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        words = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise PurgeError(f"{path} is no manifest of a purge: {words}") from error
    present = _digest(manifest.index.read_bytes()) if manifest.index.exists() else None
    if present == manifest.before:
        return manifest
    if present != manifest.after:
        raise PurgeError(f"{manifest.index} is no longer what the purge wrote: put the lines of {path} back by hand")
    if manifest.kept is None:
        manifest.index.unlink()
        return manifest
    lines = manifest.index.read_text().splitlines()
    for entry in manifest.removed:
        lines.insert(entry.at, entry.line)
    whole = manifest.kept.read_bytes() if manifest.kept.exists() else _text(lines).encode()
    if _digest(whole) != manifest.before:
        raise PurgeError(f"what was kept of {manifest.index} is damaged: put the lines of {path} back by hand")
    write_atomic(manifest.index, whole, mode=0o644)
    return manifest


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
