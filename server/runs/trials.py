"""Queries for trials."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from ..db.models import CaptureRow, Group, StageTimingRow, Trial
from ..schemas.api import CaptureInfo, TrialDetail, TrialRow
from ..schemas.events import Count
from ..schemas.outcome import OUTCOME, Failed, Scored
from ..schemas.states import Phase, TrialState
from ..schemas.trials import StageTiming


class TrialFilter(BaseModel):
    step: Count | None = None
    phase: Phase | None = None
    state: TrialState | None = None
    group: str | None = None
    limit: int = Field(default=1000, ge=1, le=5000)
    offset: Count = 0


def trial_rows(session: Session, run_id: str, filter: TrialFilter) -> list[TrialRow]:
    wanted = {Group.step: filter.step, Group.phase: filter.phase, Trial.state: filter.state, Trial.group_id: filter.group}
    query = _query(run_id).where(*(column == value for column, value in wanted.items() if value is not None))
    ordered = query.order_by(Group.step, Group.phase, Group.time, Trial.group_id, Trial.sample, Trial.trial_id)
    return [TrialRow(**_values(*row)) for row in session.execute(ordered.limit(filter.limit).offset(filter.offset))]


def trial_detail(session: Session, run_id: str, trial_id: str) -> TrialDetail | None:
    row = session.execute(_query(run_id).where(Trial.trial_id == trial_id)).first()
    if row is None:
        return None
    capture = row[2]
    timings = session.scalars(
        sa.select(StageTimingRow)
        .where(StageTimingRow.run_id == run_id, StageTimingRow.trial_id == trial_id)
        .order_by(StageTimingRow.started, StageTimingRow.seq)
    )
    return TrialDetail(
        **_values(*row),
        timings=[StageTiming(stage=timing.stage, started=timing.started, finished=timing.finished) for timing in timings],
        capture=CaptureInfo.model_validate({name: getattr(capture, name) for name in CaptureInfo.model_fields}) if capture else None,
    )


def outcome_of(trial: Trial) -> Scored | Failed | None:
    if not trial.kind:
        return None
    if trial.kind == "scored":
        return OUTCOME.validate_python(
            {"kind": "scored", "reward": trial.reward, "termination": trial.termination, "detail": trial.detail, "evidence": trial.evidence}
        )
    return OUTCOME.validate_python(
        {"kind": "failed", "stage": trial.failed_stage, "cause": trial.cause, "detail": trial.detail, "evidence": trial.evidence}
    )


def _query(run_id: str) -> sa.Select[Trial, Group, CaptureRow]:
    return (
        sa.select(Trial, Group, CaptureRow)
        .outerjoin(Group, sa.and_(Group.run_id == Trial.run_id, Group.group_id == Trial.group_id))
        .outerjoin(CaptureRow, sa.and_(CaptureRow.run_id == Trial.run_id, CaptureRow.trial_id == Trial.trial_id))
        .where(Trial.run_id == run_id)
    )


def _values(trial: Trial, group: Group | None, capture: CaptureRow | None) -> dict[str, Any]:
    return {
        "trial_id": trial.trial_id,
        "group_id": trial.group_id,
        "step": group.step if group else None,
        "phase": group.phase if group else None,
        "task": group.task if group else "",
        "harness": group.harness if group else "",
        "sample": trial.sample,
        "state": trial.state,
        "stage": trial.stage,
        "outcome": outcome_of(trial),
        "turns": capture.turns if capture else None,
        "sampled_tokens": capture.sampled_tokens if capture else None,
        "started": trial.started,
        "finished": trial.finished,
    }
