"""The task index that the runner writes before it says where it listens."""

from __future__ import annotations

from pathlib import Path

from server.schemas.tasks import TaskEntry


def read_index(path: Path) -> list[TaskEntry]:
    """The tasks of one split, in order. Raises ValueError when there are none."""
    entries = [TaskEntry.model_validate_json(line) for line in path.read_text().splitlines() if line.strip()]
    if not entries:
        raise ValueError(f"{path} lists no task")
    return entries
