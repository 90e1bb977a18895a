"""What can be regraded of a run, and how second verdicts compare with the first."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from ..context import READ, Ctx
from ..db.models import Run
from ..errors import no_run
from ..runs.regrades import archived_trials, regrade_report
from ..schemas.events import Count
from ..schemas.regrade import ArchivedTrial, RegradeReport, Verifier

router = APIRouter(prefix="/api/runs/{run_id}", tags=["regrades"], dependencies=[READ])


@router.get("/archives")
def archives(context: Ctx, run_id: str, step: Annotated[list[Count] | None, Query()] = None) -> list[ArchivedTrial]:
    """Trials whose diff is archived and whose agent's work can be judged again, in order of steps."""
    with context.db.read() as session:
        if session.get(Run, run_id) is None:
            raise no_run(run_id)
        return archived_trials(session, run_id, step or [])


@router.get("/regrades")
def regrades(context: Ctx, run_id: str, verifier: Verifier = "separate") -> RegradeReport:
    with context.db.read() as session:
        if session.get(Run, run_id) is None:
            raise no_run(run_id)
        return regrade_report(session, run_id, verifier)
