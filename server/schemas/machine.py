"""What the doctor says of a machine: `rl doctor` prints it, a runner reports it, the status page shows it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Health(StrEnum):
    OK = "ok"
    WARN = "warn"


class MachineFinding(BaseModel):
    """One check. Every `warn` says in `hint` what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    state: Health
    message: str
    hint: str = ""
