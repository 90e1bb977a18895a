"""The status page: what runners found on their machines, and whether sandboxes start slower than they did."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from ..context import READ, Ctx
from ..db.models import MachineRow, Run
from ..runs.stages import start_trend
from ..schemas.machine import Health, MachineFinding
from .pages import page

router = APIRouter(include_in_schema=False)

SHOWN = 8
"""Runs, the newest first."""
OLD_S = 180.0
"""A live runner looks every minute; older news is no news."""
SLOWER, AT_LEAST_S = 2.0, 0.1


@router.get("/machines", dependencies=[READ])
def machines(context: Ctx) -> HTMLResponse:
    with context.db.read() as session:
        rows = session.execute(
            sa.select(Run, MachineRow).join(MachineRow, MachineRow.run_id == Run.run_id).order_by(MachineRow.time.desc()).limit(SHOWN)
        ).all()
        runs = [_shown(session, run, machine) for run, machine in rows]
    return page("machines.html", machines=runs)


def _shown(session: Session, run: Run, machine: MachineRow) -> dict[str, Any]:
    findings = [MachineFinding.model_validate(finding) for finding in machine.findings]
    trend = start_trend(session, run.run_id)
    return {
        "run": run,
        "host": machine.host,
        "time": machine.time,
        "old": run.finished is None and time.time() - machine.time > OLD_S,
        "warnings": sum(finding.state is Health.WARN for finding in findings),
        "findings": sorted(findings, key=lambda finding: finding.state is Health.OK),
        "facts": machine.facts,
        "trend": trend,
        "slower": _slower(trend),
    }


def _slower(trend: list[tuple[int, float]]) -> bool:
    """The last quarter of the steps against the first, as `rl doctor` compares them."""
    quarter = len(trend) // 4
    if not quarter:
        return False
    first, last = (sum(seconds for _, seconds in part) / quarter for part in (trend[:quarter], trend[-quarter:]))
    return last >= AT_LEAST_S and last > SLOWER * first
