"""The numbers behind a run's charts."""

from __future__ import annotations

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.orm import Session

from ..db.models import Group, Metric, Run, Trial
from ..runs.regrades import regraded_points
from ..runs.status import held_out_points, train_points
from ..schemas.api import Point
from ..schemas.states import Phase


class Series(BaseModel):
    """Lists of one length, one entry per training step with an ended trial; `reward` is None where every trial failed."""

    steps: list[int]
    reward: list[float | None]
    regraded: list[float | None]
    """As `reward`, with the newest regrade in place of each first verdict; None where no trial of the step was regraded."""
    solved: list[int]
    unsolved: list[int]
    failed: list[int]
    held_out: list[Point]
    held_out_regraded: list[Point]
    """Resolved of all with the newest regrades, of evaluations with regraded trials."""
    steps_expected: int
    metric_keys: list[str]


class MetricPoint(BaseModel):
    step: int
    value: float | None


def series(session: Session, run: Run) -> Series:
    rows = session.execute(
        sa.select(
            Group.step,
            sa.func.count().filter(Trial.reward == 1),
            sa.func.count().filter(Trial.reward == 0),
            sa.func.count().filter(Trial.kind == "failed"),
        )
        .join(Trial, (Trial.run_id == Group.run_id) & (Trial.group_id == Group.group_id))
        .where(Group.run_id == run.run_id, Group.phase == Phase.TRAIN, Trial.kind != "")
        .group_by(Group.step)
        .order_by(Group.step)
    ).all()
    reward = {point.step: point.value for point in train_points(session, run.run_id)}
    regraded = regraded_points(session, run.run_id, Phase.TRAIN)
    keys = session.scalars(sa.select(Metric.key).where(Metric.run_id == run.run_id).distinct().order_by(Metric.key)).all()
    return Series(
        steps=[step for step, *_ in rows],
        reward=[reward.get(step) for step, *_ in rows],
        regraded=[regraded[step].value if step in regraded else None for step, *_ in rows],
        solved=[solved for _, solved, _, _ in rows],
        unsolved=[unsolved for _, _, unsolved, _ in rows],
        failed=[failed for *_, failed in rows],
        held_out=held_out_points(session, run.run_id),
        held_out_regraded=list(regraded_points(session, run.run_id, Phase.EVAL).values()),
        steps_expected=run.steps_expected,
        metric_keys=list(keys),
    )


def metric_points(session: Session, run_id: str, key: str) -> list[MetricPoint]:
    rows = session.execute(sa.select(Metric.step, Metric.value).where(Metric.run_id == run_id, Metric.key == key).order_by(Metric.step))
    return [MetricPoint(step=step, value=value) for step, value in rows]
