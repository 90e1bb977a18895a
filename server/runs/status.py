"""Where a run stands: every figure is a query, none is kept anywhere else."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..db.models import EvaluationDone, Group, Metric, PlanRow, Run, StepDone, Trial
from ..schemas.api import Point, RunStatus, RunSummary, StepForming, StepRow
from ..schemas.runspec import RunSpec
from ..schemas.states import Phase, RunState
from .harnesses import harness_rows
from .plans import trials_per_step
from .stats import wilson


def run_summaries(session: Session, run_id: str | None = None) -> list[RunSummary]:
    """All runs, newest first, or the one with this id (an empty list when there is none)."""
    trials = (
        sa.select(Trial.run_id, sa.func.count().label("all"), sa.func.count().filter(Trial.kind == "failed").label("failed"))
        .where(counted())
        .group_by(Trial.run_id)
        .subquery()
    )
    steps = sa.select(StepDone.run_id, sa.func.count().label("all")).group_by(StepDone.run_id).subquery()
    query = (
        sa.select(Run, trials.c.all, trials.c.failed, steps.c.all)
        .outerjoin(trials, trials.c.run_id == Run.run_id)
        .outerjoin(steps, steps.c.run_id == Run.run_id)
        .order_by(Run.created.desc(), Run.run_id)
    )
    if run_id is not None:
        query = query.where(Run.run_id == run_id)
    return [
        RunSummary(
            run_id=run.run_id,
            name=run.name,
            state=run.state,
            reason=run.reason,
            created=run.created,
            started=run.started,
            finished=run.finished,
            steps_done=done or 0,
            steps_expected=run.steps_expected,
            trials=all_trials or 0,
            failed=failed or 0,
        )
        for run, all_trials, failed, done in session.execute(query)
    ]


def run_status(session: Session, run_id: str) -> RunStatus | None:
    """Everything that `/rl:status` shows, or None when there is no such run."""
    summaries = run_summaries(session, run_id)
    run = session.get(Run, run_id)
    if run is None or not summaries:
        return None
    forming, held_out = forming_step(session, run), held_out_points(session, run_id)
    return RunStatus(
        **summaries[0].model_dump(),
        summary=_sentence(summaries[0], forming, held_out, run.problem),
        forming=forming,
        train_reward=train_points(session, run_id),
        held_out=held_out,
        outcomes=_outcomes(session, run_id),
        harnesses=harness_rows(session, run_id),
        last_metrics=_last_metrics(session, run_id),
        last_event=run.last_event,
        problem=run.problem,
    )


def run_spec(session: Session, run: Run) -> RunSpec:
    plan = session.get_one(PlanRow, run.digest)
    return RunSpec.model_validate(plan.spec)


def forming_step(session: Session, run: Run) -> StepForming | None:
    """The newest step or evaluation that has groups but no result yet."""
    newest = session.execute(
        sa.select(Group.step, Group.phase)
        .where(Group.run_id == run.run_id, Group.phase != Phase.SUPERSEDED)
        .order_by(Group.time.desc(), Group.step.desc())
        .limit(1)
    ).first()
    if newest is None or run.finished is not None:
        return None
    step, phase = newest
    if session.get(StepDone if phase is Phase.TRAIN else EvaluationDone, (run.run_id, step)) is not None:
        return None
    of_step = (Group.run_id == run.run_id, Group.step == step, Group.phase == phase)
    begun = session.scalar(sa.select(sa.func.sum(Group.size)).where(*of_step)) or 0
    counts = session.execute(
        sa.select(Trial.kind, Trial.cause, sa.func.count())
        .join(Group, sa.and_(Group.run_id == Trial.run_id, Group.group_id == Trial.group_id))
        .where(*of_step, Trial.kind != "")
        .group_by(Trial.kind, Trial.cause)
    ).all()
    failures = {cause: count for kind, cause, count in counts if kind == "failed" and cause}
    spec = run_spec(session, run)
    planned = trials_per_step(spec) if phase is Phase.TRAIN else spec.trainer.evaluation.rollouts
    return StepForming(
        step=step,
        phase=phase,
        expected=max(planned, begun),
        done=sum(count for *_, count in counts),
        failed=sum(failures.values()),
        failures=failures,
    )


def train_points(session: Session, run_id: str) -> list[Point]:
    """Mean reward of the scored training trials of each step. Failed trials are in neither numerator nor denominator."""
    rows = session.execute(
        sa.select(Group.step, sa.func.sum(Trial.reward), sa.func.count())
        .join(Group, sa.and_(Group.run_id == Trial.run_id, Group.group_id == Trial.group_id))
        .where(Trial.run_id == run_id, Trial.kind == "scored", Group.phase == Phase.TRAIN)
        .group_by(Group.step)
        .order_by(Group.step)
    )
    return [share_point(step, solved or 0, n) for step, solved, n in rows]


def held_out_points(session: Session, run_id: str) -> list[Point]:
    """Resolved / all of each held-out evaluation: a failed trial counts as not resolved."""
    rows = session.scalars(sa.select(EvaluationDone).where(EvaluationDone.run_id == run_id).order_by(EvaluationDone.step))
    return [share_point(row.step, row.resolved, row.total) for row in rows]


def step_rows(session: Session, run_id: str) -> list[StepRow]:
    metrics: dict[int, dict[str, float]] = {}
    for step, key, value in session.execute(sa.select(Metric.step, Metric.key, Metric.value).where(Metric.run_id == run_id)):
        if value is not None:
            metrics.setdefault(step, {})[key] = value
    steps = session.scalars(sa.select(StepDone).where(StepDone.run_id == run_id).order_by(StepDone.step))
    return [StepRow(step=row.step, time=row.time, metrics=metrics.get(row.step, {})) for row in steps]


def counted() -> sa.ColumnElement[bool]:
    """Trials of steps that were not lost with a trainer and done again."""
    group = (Group.run_id == Trial.run_id, Group.group_id == Trial.group_id, Group.phase == Phase.SUPERSEDED)
    return ~sa.exists().where(*group)


def share_point(step: int, successes: int, n: int) -> Point:
    """A share with its 95 % interval."""
    low, high = wilson(successes, n)
    return Point(step=step, value=successes / n if n else 0.0, n=n, low=low, high=high)


def _outcomes(session: Session, run_id: str) -> dict[str, int]:
    """Termination of scored trials and cause of failed ones → count."""
    label = sa.func.coalesce(Trial.termination, Trial.cause)
    rows = session.execute(
        sa.select(label, sa.func.count()).where(Trial.run_id == run_id, Trial.kind != "", counted()).group_by(label).order_by(label)
    )
    return {name: count for name, count in rows}


def _last_metrics(session: Session, run_id: str) -> dict[str, float]:
    last = sa.select(sa.func.max(StepDone.step)).where(StepDone.run_id == run_id).scalar_subquery()
    rows = session.execute(
        sa.select(Metric.key, Metric.value).where(Metric.run_id == run_id, Metric.step == last, Metric.value.is_not(None))
    )
    return {key: value for key, value in rows if value is not None}


def _sentence(run: RunSummary, forming: StepForming | None, held_out: list[Point], problem: str) -> str:
    parts = [f"{run.state}, {run.steps_done} of {run.steps_expected} steps" if run.steps_expected else str(run.state)]
    if forming is not None:
        what = f"step {forming.step}" if forming.phase is Phase.TRAIN else f"held-out evaluation after step {forming.step}"
        failed = f", {forming.failed} failed: {', '.join(sorted(forming.failures))}" if forming.failed else ""
        parts.append(f"{what}: {forming.done}/{forming.expected} trials{failed}")
    elif run.failed:
        parts.append(f"{run.failed} of {run.trials} trials failed")
    if held_out:
        ends = held_out if len(held_out) == 1 else (held_out[0], held_out[-1])
        parts.append(f"held-out solve rate {' → '.join(f'{point.value:.2f}' for point in ends)}")
    if run.state not in (RunState.STOPPING, RunState.SUCCEEDED) and (problem or run.reason):
        parts.append(problem or run.reason)
    return "; ".join(parts)
