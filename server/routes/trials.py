"""Trials of a run: the list, one trial, and what was captured of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query

from ..context import READ, Ctx
from ..db.models import CaptureRow
from ..runs.atif import trajectory
from ..runs.files import Missing, read_capture, run_dir
from ..runs.tokens import turn_tokens
from ..runs.trials import TrialFilter, trial_detail, trial_rows
from ..schemas.api import TrialDetail, TrialRow
from ..schemas.capture import CaptureRecord, TurnTokens
from ..schemas.events import Count

router = APIRouter(prefix="/api/runs/{run_id}/trials", tags=["trials"], dependencies=[READ])


@router.get("")
def trials(context: Ctx, run_id: str, filter: Annotated[TrialFilter, Query()]) -> list[TrialRow]:
    """In order of step, group and sample."""
    with context.db.read() as session:
        return trial_rows(session, run_id, filter)


@router.get("/{trial_id}")
def trial(context: Ctx, run_id: str, trial_id: str) -> TrialDetail:
    with context.db.read() as session:
        detail = trial_detail(session, run_id, trial_id)
    if detail is None:
        raise HTTPException(404, f"run {run_id} has no trial {trial_id}")
    return detail


@router.get("/{trial_id}/capture")
def capture(context: Ctx, run_id: str, trial_id: str) -> CaptureRecord:
    """Turns, branches and their fate, in text and numbers."""
    with context.db.read() as session:
        row = session.get(CaptureRow, (run_id, trial_id))
    if row is None:
        raise HTTPException(404, f"nothing was captured of trial {trial_id} of run {run_id}")
    try:
        return read_capture(run_dir(context.settings, run_id), row)
    except Missing as error:
        raise HTTPException(404, str(error)) from None


@router.get("/{trial_id}/trajectory")
def atif(context: Ctx, run_id: str, trial_id: str) -> dict[str, Any]:
    """The capture as an ATIF trajectory, the same for every harness."""
    detail, record = trial(context, run_id, trial_id), capture(context, run_id, trial_id)
    result = detail.model_dump(mode="json", include={"task", "step", "phase", "state", "stage", "outcome"})
    try:
        harnesses = run_dir(context.settings, run_id).load().spec.harnesses
    except (FileNotFoundError, ValueError):  # a run whose start failed early, or whose directory was cleared
        harnesses = []
    version = next((harness.version for harness in harnesses if harness.name == record.harness), "unknown")
    try:
        return trajectory(record, version, result)
    except ValueError as error:
        raise HTTPException(404, str(error)) from None


@router.get("/{trial_id}/capture/tokens")
def tokens(context: Ctx, run_id: str, trial_id: str, turn: Count) -> TurnTokens:
    """The ids of one turn, from the capture file."""
    record = capture(context, run_id, trial_id)
    try:
        return turn_tokens(run_dir(context.settings, run_id), record, turn)
    except Missing as error:
        raise HTTPException(404, str(error)) from None
