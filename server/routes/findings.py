"""Findings of a run, and a person's decision about each."""

from __future__ import annotations

import time

import sqlalchemy as sa
from fastapi import APIRouter, HTTPException
from sqlalchemy.orm import Session

from ..context import READ, WRITE, Ctx
from ..db.models import FindingRow, ReviewRow
from ..schemas.api import ReviewRequest
from ..schemas.checks import Finding

router = APIRouter(prefix="/api", tags=["findings"])


@router.get("/runs/{run_id}/findings", dependencies=[READ])
def findings(context: Ctx, run_id: str) -> list[Finding]:
    with context.db.read() as session:
        rows = session.scalars(sa.select(FindingRow).where(FindingRow.run_id == run_id).order_by(FindingRow.time, FindingRow.finding_id))
        return [finding_of(session, row) for row in rows]


@router.post("/findings/{finding_id}/review", dependencies=[WRITE])
def review(context: Ctx, finding_id: str, request: ReviewRequest) -> Finding:
    """Every decision is kept; the newest one counts."""
    with context.db.write() as session:
        row = session.get(FindingRow, finding_id)
        if row is None:
            raise HTTPException(404, f"there is no finding {finding_id}: `rl diagnose RUN` lists them")
        session.add(ReviewRow(finding_id=finding_id, verdict=request.verdict, note=request.note, time=time.time()))
        session.flush()
        return finding_of(session, row)


def finding_of(session: Session, row: FindingRow) -> Finding:
    newest = sa.select(ReviewRow).where(ReviewRow.finding_id == row.finding_id).order_by(ReviewRow.review_id.desc()).limit(1)
    decision = session.scalar(newest)
    return Finding.model_validate(
        {
            "id": row.finding_id,
            "detector": row.detector,
            "title": row.title,
            "detail": row.detail,
            "fault": row.fault,
            "evidence": row.evidence,
            "verdict": decision.verdict if decision else None,
            "note": decision.note if decision else "",
        }
    )
