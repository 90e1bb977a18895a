"""Task directories in Harbor's format, listed by an index that the runner writes before it says where it listens."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from .trials import Identifier

TRAIN = "train"
HELD_OUT = "held_out"


class TaskEntry(BaseModel):
    """One line of `tasks/<split>/index.jsonl`. Holds nothing of the solution or the tests."""

    model_config = ConfigDict(extra="forbid")

    task: Identifier
    kind: str = ""
    """Sub-family, for the split of solve rates."""
    instruction: str
    harness: Identifier | None = None
    """The harness that this task is always played in, from `[metadata]` of its task.toml; by default one is drawn."""
