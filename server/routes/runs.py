"""Runs: the list, one run's status, its steps, metrics and logs."""

from __future__ import annotations

import time
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.concurrency import run_in_threadpool

from ..context import READ, WRITE, Context, Ctx
from ..db.models import LogRow, Metric, PlanRow
from ..errors import no_run
from ..launchers.process import CannotLaunch
from ..runs.files import Missing, inside, run_dir, tail
from ..runs.plans import train_steps
from ..runs.status import run_status, run_summaries, step_rows
from ..schemas.api import LogFile, LogTail, RunStatus, RunSummary, StartRequest, StepRow
from ..schemas.runspec import RunSpec
from ..schemas.states import TERMINAL_RUN_STATES

router = APIRouter(prefix="/api/runs", tags=["runs"], dependencies=[READ])

SETTLE_S = 0.3
"""A waiting client is told of many events at once, not of each."""


@router.get("")
def runs(context: Ctx) -> list[RunSummary]:
    """Newest first."""
    with context.db.read() as session:
        return run_summaries(session)


@router.post("", dependencies=[WRITE], status_code=201)
def start_run(context: Ctx, request: StartRequest, response: Response) -> RunSummary:
    """Start a run of a plan that was shown: one run each time it is shown. Asked again, the answer is that run, with status 200."""
    with context.db.read() as session:
        plan = session.get(PlanRow, request.digest)
    if plan is None:
        raise HTTPException(404, f"there is no plan {request.digest}: a run starts from the digest of a plan that was shown")
    spec = RunSpec.model_validate(plan.spec)
    name = spec.reporting.name or f"{spec.data.family or 'tasks'} in {', '.join(harness.name for harness in spec.harnesses)}"
    try:
        run_id, new = context.launcher.create(plan.digest, spec, name, train_steps(spec))
        if new:
            context.launcher.start(run_id)
        else:
            response.status_code = 200
    except CannotLaunch as error:
        raise HTTPException(503, str(error)) from None
    return _summary(context, run_id)


@router.post("/{run_id}/stop", dependencies=[WRITE])
def stop_run(context: Ctx, run_id: str) -> RunSummary:
    """Answers at once; the run is `stopping` until its processes have ended. Stopping a run that has ended changes nothing."""
    context.launcher.stop(run_id)
    context.changes.notify(run_id)
    return _summary(context, run_id)


@router.get("/{run_id}")
async def run(context: Ctx, run_id: str, wait: Annotated[float, Query(ge=0, le=60)] = 0) -> RunStatus:
    """With `wait` the answer comes when state, steps or the forming step changed, at the latest after that many seconds.

    A run that has ended does not change: it is answered at once.
    """
    first = status = await run_in_threadpool(_status, context, run_id)
    deadline = time.monotonic() + wait
    while _visible(status) == _visible(first) and status.state not in TERMINAL_RUN_STATES:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        # Short waits: what changed between the look and the wait is found by the next look.
        await context.changes.wait(run_id, min(left, 1.0))
        await context.changes.wait("settle", min(SETTLE_S, max(0.0, deadline - time.monotonic())))
        status = await run_in_threadpool(_status, context, run_id)
    return status


@router.get("/{run_id}/steps")
def steps(context: Ctx, run_id: str) -> list[StepRow]:
    with context.db.read() as session:
        return step_rows(session, run_id)


@router.get("/{run_id}/metrics")
def metrics(context: Ctx, run_id: str, key: Annotated[list[str] | None, Query()] = None) -> dict[str, list[tuple[int, float | None]]]:
    """Key → (step, value) in order of steps, of the keys asked for or of all; a value that was NaN or infinite is null."""
    query = sa.select(Metric.key, Metric.step, Metric.value).where(Metric.run_id == run_id).order_by(Metric.key, Metric.step)
    if key:
        query = query.where(Metric.key.in_(key))
    series: dict[str, list[tuple[int, float | None]]] = {name: [] for name in key or ()}
    with context.db.read() as session:
        for name, step, value in session.execute(query):
            series.setdefault(name, []).append((step, value))
    return series


@router.get("/{run_id}/logs")
def logs(context: Ctx, run_id: str) -> list[LogFile]:
    directory = run_dir(context.settings, run_id)
    with context.db.read() as session:
        rows = session.scalars(sa.select(LogRow).where(LogRow.run_id == run_id).order_by(LogRow.name)).all()
    found = []
    for row in rows:
        try:
            found.append(LogFile(name=row.name, size=inside(directory, row.path).stat().st_size))
        except Missing:
            continue
    return found


@router.get("/{run_id}/logs/{name}")
def log(context: Ctx, run_id: str, name: str, lines: Annotated[int, Query(ge=1, le=5000)] = 200) -> LogTail:
    with context.db.read() as session:
        row = session.get(LogRow, (run_id, name))
    if row is None:
        raise HTTPException(404, f"run {run_id} has no log {name}")
    try:
        return LogTail(name=name, lines=tail(inside(run_dir(context.settings, run_id), row.path), lines))
    except Missing as error:
        raise HTTPException(404, str(error)) from None


def _status(context: Context, run_id: str) -> RunStatus:
    with context.db.read() as session:
        status = run_status(session, run_id)
    if status is None:
        raise no_run(run_id)
    return status


def _summary(context: Context, run_id: str) -> RunSummary:
    with context.db.read() as session:
        found = run_summaries(session, run_id)
    if not found:
        raise no_run(run_id)
    return found[0]


def _visible(status: RunStatus) -> tuple[object, ...]:
    return status.state, status.steps_done, len(status.held_out), status.forming
