"""What a trial came to: `Scored` or `Failed`, never both.

`Failed` has no reward field, so an infrastructure failure cannot be averaged into a reward by accident (paper section 3.2.1).
`ADMISSION` is the table of `Outcome` kinds as data: whether the trial is trained, retried, and whose fault it counts as.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Stage(StrEnum):
    """The stages of a trial, in order; each has its own deadline."""

    QUEUED = "queued"
    IMAGE = "image"
    SANDBOX_SETUP = "sandbox_setup"
    AGENT_SETUP = "agent_setup"
    AGENT = "agent"
    COLLECT = "collect"
    VERIFIER = "verifier"
    DONE = "done"


class Termination(StrEnum):
    """Why the agent of a scored trial stopped."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    OVER_LENGTH = "over_length"
    AGENT_FAULT = "agent_fault"
    TAMPERED = "tampered"


class Cause(StrEnum):
    """Why a trial has no reward."""

    IMAGE = "image"
    SANDBOX_SETUP = "sandbox_setup"
    AGENT_SETUP = "agent_setup"
    AGENT_TIMEOUT = "agent_timeout"
    HARNESS_NEVER_CALLED = "harness_never_called"
    RUNNER_LOST = "runner_lost"
    PROXY = "proxy"
    ENGINE = "engine"
    VERIFIER = "verifier"
    VERIFIER_TIMEOUT = "verifier_timeout"
    CANCELLED = "cancelled"


class Fault(StrEnum):
    """Whose failure it was, for the split on the dashboard and in a diagnosis."""

    POLICY = "policy"
    INFRASTRUCTURE = "infrastructure"
    UNKNOWN = "unknown"


class Admission(NamedTuple):
    """One row of the admission table: `retries` counts further attempts after the first."""

    trained: bool
    retries: int
    fault: Fault


ADMISSION: dict[Termination | Cause, Admission] = {
    **dict.fromkeys(Termination, Admission(trained=True, retries=0, fault=Fault.POLICY)),
    **dict.fromkeys(Cause, Admission(trained=False, retries=0, fault=Fault.INFRASTRUCTURE)),
    Cause.AGENT_TIMEOUT: Admission(trained=False, retries=0, fault=Fault.UNKNOWN),
    Cause.SANDBOX_SETUP: Admission(trained=False, retries=1, fault=Fault.INFRASTRUCTURE),
    Cause.AGENT_SETUP: Admission(trained=False, retries=1, fault=Fault.INFRASTRUCTURE),
    Cause.VERIFIER: Admission(trained=False, retries=1, fault=Fault.INFRASTRUCTURE),
    Cause.VERIFIER_TIMEOUT: Admission(trained=False, retries=1, fault=Fault.INFRASTRUCTURE),
}


class Scored(BaseModel):
    """The task's own tests gave a verdict."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["scored"] = "scored"
    reward: Literal[0, 1]
    termination: Termination
    detail: str = ""
    evidence: list[str] = Field(default_factory=list)
    """Signs that the agent went for the reward instead of the task (`suspicion.py`). They never change the reward."""


class Failed(BaseModel):
    """No verdict: excluded from group statistics, loss and reward curves. `evidence` holds host-side log lines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["failed"] = "failed"
    stage: Stage
    cause: Cause
    detail: str = ""
    evidence: list[str] = Field(default_factory=list)


Outcome = Annotated[Scored | Failed, Field(discriminator="kind")]
OUTCOME: TypeAdapter[Scored | Failed] = TypeAdapter(Outcome)


def admission(outcome: Scored | Failed) -> Admission:
    """The table row of an outcome."""
    return ADMISSION[outcome.termination if isinstance(outcome, Scored) else outcome.cause]
