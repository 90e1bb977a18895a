"""What a regrade needs of a run, and what came of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from .events import Count
from .outcome import Outcome, Scored
from .states import Phase

Verifier = Literal["separate", "shared"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ArchivedTrial(_Body):
    """One row of `GET /api/runs/{id}/archives`: a trial with a diff that can be graded again. `path` is relative to the run's directory."""

    trial_id: str
    task: str
    harness: str
    step: Count
    phase: Phase
    path: str
    size: int
    sha256: str
    outcome: Outcome


class Change(_Body):
    """A trial whose newest regrade is not its first verdict. `first` may be a failure: then it had no verdict before."""

    trial_id: str
    task: str
    step: Count
    phase: Phase
    first: Outcome
    again: Scored


class RegradeReport(_Body):
    """`GET /api/runs/{id}/regrades`. `compared` trials had a reward before and have another verdict now; `agreement` is the share of them
    with the same reward, None when there are none."""

    run_id: str
    verifier: Verifier
    regraded: int
    compared: int
    agreed: int
    agreement: float | None
    changed: list[Change]
    """Every trial with another reward, in order of steps."""
    newly_graded: list[Change]
    """Trials that had failed."""
