"""Pages and fragments. htmx asks for the fragments again while a run lives; Jinja2 escapes whatever a policy or a task wrote."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import sqlalchemy as sa
from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, select_autoescape

from ..context import READ, WRITE, Ctx
from ..db.models import CaptureRow, Group, ReviewRow, Run
from ..diagnosis.service import diagnose, store
from ..errors import no_run
from ..runs.files import Missing, read_capture, run_dir
from ..runs.placed import place
from ..runs.regrades import regrades_of
from ..runs.stages import stage_shares, trial_parts
from ..runs.status import run_spec, run_status, run_summaries
from ..runs.trials import TrialFilter, trial_detail, trial_rows
from ..schemas.checks import Verdict
from ..schemas.events import Count
from ..schemas.hints import HINTS
from ..schemas.states import Phase
from ..security import COOKIE
from .series import MetricPoint, Series, metric_points, series

router = APIRouter(include_in_schema=False)

POLICY_NOTE = (
    "The policy of this run is a demonstration: about half a million parameters, a vocabulary that holds whole blocks of this harness's "
    "prompt as single tokens, and a warm start from demonstrations of which many are wrong on purpose. The run shows that the loop "
    "works, not that a large model would learn."
)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    age = max(0, int(time.time() - seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= size:
            return f"{age // size} {unit} ago"
    return f"{age} s ago"


@cache
def _templates() -> Environment:
    here = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=here, autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(clock=_clock, ago=_ago, percent=lambda value: f"{value:.0%}")
    environment.globals["hints"] = HINTS
    return environment


def page(name: str, **values: Any) -> HTMLResponse:
    """A template with its values escaped; no cache keeps it."""
    return HTMLResponse(_templates().get_template(name).render(values), headers={"cache-control": "no-store"})


@router.get("/", dependencies=[READ])
def runs(context: Ctx) -> HTMLResponse:
    with context.db.read() as session:
        return page("runs.html", runs=run_summaries(session))


@router.get("/runs/{run_id}", dependencies=[READ])
def run(context: Ctx, run_id: str) -> HTMLResponse:
    with context.db.read() as session:
        status = run_status(session, run_id)
        if status is None:
            raise no_run(run_id)
        builtin = run_spec(session, session.get_one(Run, run_id)).model.path.startswith("builtin:")
    return page("run.html", status=status, policy_note=POLICY_NOTE if builtin else "")


@router.get("/runs/{run_id}/live", dependencies=[READ])
def live(context: Ctx, run_id: str) -> HTMLResponse:
    with context.db.read() as session:
        status = run_status(session, run_id)
    if status is None:
        raise no_run(run_id)
    return page("_live.html", status=status)


@router.get("/runs/{run_id}/stages", dependencies=[READ])
def stages(context: Ctx, run_id: str) -> HTMLResponse:
    with context.db.read() as session:
        return page("_stages.html", shares=stage_shares(session, run_id))


@router.get("/runs/{run_id}/series.json", dependencies=[READ])
def run_series(context: Ctx, run_id: str) -> Series:
    with context.db.read() as session:
        row = session.get(Run, run_id)
        if row is None:
            raise no_run(run_id)
        return series(session, row)


@router.get("/runs/{run_id}/metric.json", dependencies=[READ])
def run_metric(context: Ctx, run_id: str, key: str) -> list[MetricPoint]:
    with context.db.read() as session:
        return metric_points(session, run_id, key)


@router.get("/runs/{run_id}/trials", dependencies=[READ])
def trials(context: Ctx, run_id: str, phase: Phase | None = None, step: Count | None = None) -> HTMLResponse:
    """The trials of one step or evaluation, by default of the newest."""
    with context.db.read() as session:
        query = sa.select(Group.phase, Group.step).where(Group.run_id == run_id).group_by(Group.phase, Group.step)
        steps = session.execute(query.order_by(sa.func.min(Group.time))).all()
        if steps and (phase is None or step is None):
            phase, step = steps[-1]
        rows = trial_rows(session, run_id, TrialFilter(phase=phase, step=step)) if steps else []
    return page("_trials.html", run_id=run_id, steps=steps, phase=phase, step=step, trials=rows)


@router.get("/runs/{run_id}/trials/{trial_id}", dependencies=[READ])
def trial(context: Ctx, run_id: str, trial_id: str) -> HTMLResponse:
    with context.db.read() as session:
        detail = trial_detail(session, run_id, trial_id)
        row = session.get(CaptureRow, (run_id, trial_id))
        again = regrades_of(session, run_id, trial_id)
    if detail is None:
        raise HTTPException(404, f"run {run_id} has no trial {trial_id}")
    parts = trial_parts(detail.timings, detail.started, detail.finished)
    capture, missing = None, ""
    if row is not None:
        try:
            capture = read_capture(run_dir(context.settings, run_id), row)
        except Missing as error:
            missing = str(error)
    placed = place(capture) if capture else None
    shown = {"capture": capture, "placed": placed, "missing": missing, "again": again, "parts": parts}
    return page("trial.html", run_id=run_id, t=detail, timings=detail.timings, **shown)


@router.get("/runs/{run_id}/findings", dependencies=[READ])
def findings(context: Ctx, request: Request, run_id: str) -> HTMLResponse:
    with context.db.read() as session:
        diagnosis = diagnose(session, run_id)
    return page("_findings.html", diagnosis=diagnosis, may_write=_signed_in(context, request))


@router.post("/runs/{run_id}/findings/{finding_id}", dependencies=[WRITE])
async def review(context: Ctx, request: Request, run_id: str, finding_id: str) -> HTMLResponse:
    """A person's decision, from the page's form."""
    form = parse_qs((await request.body()).decode(errors="replace"))
    try:
        verdict = Verdict(form.get("verdict", [""])[0])
    except ValueError:
        raise HTTPException(422, "a verdict is `confirmed` or `rejected`") from None
    note = form.get("note", [""])[0][:500]

    def decide() -> HTMLResponse:
        with context.db.write() as session:
            before = diagnose(session, run_id)
            if finding_id not in {finding.id for finding in before.findings}:
                raise HTTPException(404, f"run {run_id} has no finding {finding_id}")
            store(session, before)
            session.flush()
            session.add(ReviewRow(finding_id=finding_id, verdict=verdict, note=note, time=time.time()))
            session.flush()
            return page("_findings.html", diagnosis=diagnose(session, run_id), may_write=True)

    return await run_in_threadpool(decide)


@router.get("/sign-in")
def sign_in_form() -> HTMLResponse:
    return page("sign_in.html", wrong=False)


@router.post("/sign-in")
async def sign_in(context: Ctx, request: Request) -> Response:
    """Trade the token for a cookie; the token travels in the body, so it is in no history and no log."""
    token = parse_qs((await request.body()).decode(errors="replace")).get("token", [""])[0].strip()
    if not context.guard.is_token(token):
        refused = page("sign_in.html", wrong=True)
        refused.status_code = 401
        return refused
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", max_age=30 * 86400)
    return answer


def _signed_in(context: Ctx, request: Request) -> bool:
    cookie = request.cookies.get(COOKIE)
    return cookie is not None and context.guard.is_token(cookie)
