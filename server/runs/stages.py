"""Where the time of trials goes, by stage."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..db.models import Group, StageTimingRow, Trial
from ..schemas.outcome import Stage
from ..schemas.stages import Part, StageShare
from ..schemas.states import Phase
from ..schemas.trials import StageTiming
from .status import counted

PARTS = {
    Stage.IMAGE: Part.SANDBOX_SETUP,
    Stage.SANDBOX_SETUP: Part.SANDBOX_SETUP,
    Stage.AGENT_SETUP: Part.AGENT_SETUP,
    Stage.AGENT: Part.AGENT,
    Stage.VERIFIER: Part.VERIFICATION,
}
"""Every other stage, and what lies between stages, is `other`. Waiting for a place to run (`queued`) does not count."""


def stage_shares(session: Session, run_id: str) -> list[StageShare]:
    """Mean seconds per ended trial of each part, and its share of the whole; empty before the first trial has ended. Lost steps do not
    count: their trials end when a trainer goes on."""
    ended = (Trial.run_id == run_id, Trial.kind != "", Trial.started.is_not(None), Trial.finished.is_not(None), counted())
    trials, whole = session.execute(sa.select(sa.func.count(), sa.func.sum(Trial.finished - Trial.started)).where(*ended)).one()
    if not trials or not whole or whole <= 0:
        return []
    rows = session.execute(
        sa.select(StageTimingRow.stage, sa.func.sum(StageTimingRow.finished - StageTimingRow.started))
        .join(Trial, (Trial.run_id == StageTimingRow.run_id) & (Trial.trial_id == StageTimingRow.trial_id))
        .where(*ended)
        .group_by(StageTimingRow.stage)
    )
    seconds = dict.fromkeys(Part, 0.0)
    for stage, total in rows:
        if stage in PARTS:
            seconds[PARTS[stage]] += total or 0.0
    seconds[Part.OTHER] = max(0.0, whole - sum(seconds.values()))
    return [StageShare(part=part, seconds=round(total / trials, 4), share=round(total / whole, 4)) for part, total in seconds.items()]


def trial_parts(timings: list[StageTiming], started: float | None, finished: float | None) -> dict[Part, float]:
    """Seconds of one ended trial by part; empty while it runs."""
    if started is None or finished is None:
        return {}
    seconds = dict.fromkeys(Part, 0.0)
    for timing in timings:
        if timing.stage in PARTS and timing.finished is not None:
            seconds[PARTS[timing.stage]] += timing.finished - timing.started
    seconds[Part.OTHER] = max(0.0, finished - started - sum(seconds.values()))
    return seconds


def start_trend(session: Session, run_id: str) -> list[tuple[int, float]]:
    """(step, mean seconds to set up the sandbox of a training trial), in order of steps."""
    rows = session.execute(
        sa.select(Group.step, sa.func.avg(StageTimingRow.finished - StageTimingRow.started))
        .join(Trial, (Trial.run_id == StageTimingRow.run_id) & (Trial.trial_id == StageTimingRow.trial_id))
        .join(Group, (Group.run_id == Trial.run_id) & (Group.group_id == Trial.group_id))
        .where(StageTimingRow.run_id == run_id, StageTimingRow.stage == Stage.SANDBOX_SETUP, Group.phase == Phase.TRAIN)
        .group_by(Group.step)
        .order_by(Group.step)
    )
    return [(step, float(seconds)) for step, seconds in rows]
