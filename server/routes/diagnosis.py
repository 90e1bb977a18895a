"""The diagnosis of a run."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from ..context import WRITE, Ctx
from ..db.models import Run
from ..diagnosis.explain import ExplanationUnavailable
from ..diagnosis.service import diagnose, earlier_reviews, store, with_explanation
from ..errors import no_run
from ..schemas.api import DiagnoseRequest
from ..schemas.checks import Diagnosis

router = APIRouter(prefix="/api/runs/{run_id}/diagnose", tags=["findings"])


@router.post("", dependencies=[WRITE])
def diagnose_run(context: Ctx, run_id: str, request: DiagnoseRequest) -> Diagnosis:
    """Run the detectors, store what they found, and explain it when asked to."""
    with context.db.write() as session:
        if session.get(Run, run_id) is None:
            raise no_run(run_id)
        diagnosis = diagnose(session, run_id)
        store(session, diagnosis)
        reviews = earlier_reviews(session, run_id)
    if not request.explain:
        return diagnosis
    try:
        return with_explanation(context.settings, diagnosis, reviews)
    except ExplanationUnavailable as error:
        raise HTTPException(503, str(error)) from None
