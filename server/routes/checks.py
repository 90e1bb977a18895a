"""Checks before a run. They start sandboxes, so the answer is a job to ask again."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from fastapi.concurrency import run_in_threadpool

from ..context import READ, WRITE, Context, Ctx
from ..db.models import CheckRow
from ..schemas.api import CheckJob, CheckRequest
from ..schemas.checks import CheckReport

router = APIRouter(prefix="/api/checks", tags=["checks"])


@router.post("", dependencies=[WRITE], status_code=202)
def start_check(context: Ctx, request: CheckRequest) -> CheckJob:
    return CheckJob(check_id=context.checks.start(request), report=None)


@router.get("/{check_id}", dependencies=[READ])
async def check(context: Ctx, check_id: str, wait: Annotated[float, Query(ge=0, le=60)] = 0) -> CheckJob:
    """With `wait` the answer comes when the report is there, at the latest after that many seconds."""
    deadline = time.monotonic() + wait
    job = await run_in_threadpool(_job, context, check_id)
    while job.report is None and (left := deadline - time.monotonic()) > 0:
        # Short waits: a report that was stored between the look and the wait is found by the next look.
        await context.changes.wait(check_id, min(left, 1.0))
        job = await run_in_threadpool(_job, context, check_id)
    return job


def _job(context: Context, check_id: str) -> CheckJob:
    with context.db.read() as session:
        row = session.get(CheckRow, check_id)
        if row is None:
            raise HTTPException(404, f"there is no check {check_id}: start one with `rl check`")
        return CheckJob(check_id=check_id, report=CheckReport.model_validate(row.report) if row.report else None)
