"""What runs say about tasks: how often a task's trials had no reward, and why."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from .outcome import Cause


class TaskTrial(BaseModel):
    """A failed trial, cited."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    trial_id: str
    cause: Cause
    detail: str


class TaskRecord(BaseModel):
    """One row of `GET /api/tasks`. `trials` have ended; `failed` counts those without a reward by cause; `examples` are the newest few."""

    model_config = ConfigDict(extra="forbid")

    task: str
    trials: int
    failed: dict[Cause, int]
    examples: list[TaskTrial]
