"""The record as Prometheus metrics: a scrape is a query, nothing is kept between two.

Runs that have ended are counted by state and otherwise left out, so that a scrape does not grow with their number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import sqlalchemy as sa
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric as Family
from sqlalchemy.orm import Session

from ..db.models import EvaluationDone, Metric, Run, StageTimingRow, StepDone, Trial
from ..schemas.states import TERMINAL_RUN_STATES, RunState


def families(session: Session) -> Iterator[Family]:
    """Every figure of the runs that are under way."""
    yield _states(session)
    live = list(session.scalars(sa.select(Run).where(Run.state.not_in(TERMINAL_RUN_STATES)).order_by(Run.run_id)))
    ids = [run.run_id for run in live]
    yield _last_events(live)
    yield _progress(session, live)
    yield _trials(session, ids)
    yield _solve_rates(session, ids)
    yield _stages(session, ids)
    yield _step_metrics(session, ids)


def _states(session: Session) -> Family:
    family = GaugeMetricFamily("lego_rl_runs", "Runs by state.", labels=["state"])
    counts = {state: count for state, count in session.execute(sa.select(Run.state, sa.func.count()).group_by(Run.state))}
    for state in RunState:
        family.add_metric([state], counts.get(state, 0))
    return family


def _last_events(live: list[Run]) -> Family:
    family = GaugeMetricFamily("lego_rl_run_silence_seconds", "Since the last event of a run was stored.", labels=["run"])
    now = time.time()
    for run in live:
        if run.last_event is not None:
            family.add_metric([run.run_id], max(0.0, now - run.last_event))
    return family


def _progress(session: Session, live: list[Run]) -> Family:
    """Steps done, and how many there will be."""
    family = GaugeMetricFamily("lego_rl_run_steps", "Optimizer steps of a run: done, expected.", labels=["run", "which"])
    done = {run: count for run, count in session.execute(sa.select(StepDone.run_id, sa.func.count()).group_by(StepDone.run_id))}
    for run in live:
        family.add_metric([run.run_id, "done"], done.get(run.run_id, 0))
        family.add_metric([run.run_id, "expected"], run.steps_expected)
    return family


def _trials(session: Session, ids: list[str]) -> Family:
    """`outcome` is how a scored trial ended or why a failed one did."""
    family = CounterMetricFamily("lego_rl_trials", "Trials that ended, by outcome.", labels=["run", "kind", "outcome"])
    outcome = sa.func.coalesce(Trial.cause, Trial.termination, "")
    query = sa.select(Trial.run_id, Trial.kind, outcome, sa.func.count()).where(Trial.run_id.in_(ids), Trial.kind != "")
    for run, kind, why, count in session.execute(query.group_by(Trial.run_id, Trial.kind, outcome)):
        family.add_metric([run, kind, why], count)
    return family


def _solve_rates(session: Session, ids: list[str]) -> Family:
    """Of the newest evaluation, over all trials and over those that executed."""
    family = GaugeMetricFamily("lego_rl_held_out_solve_rate", "Newest held-out solve rate.", labels=["run", "over"])
    for run in ids:
        newest = sa.select(EvaluationDone).where(EvaluationDone.run_id == run).order_by(EvaluationDone.step.desc()).limit(1)
        if (done := session.scalar(newest)) is not None:
            for over, total in (("all", done.total), ("executed", done.executed)):
                if total:
                    family.add_metric([run, over], done.resolved / total)
    return family


def _stages(session: Session, ids: list[str]) -> Family:
    family = SummaryMetricFamily("lego_rl_trial_stage_seconds", "Time that trials spent in a stage.", labels=["run", "stage"])
    row = StageTimingRow
    spent = sa.select(row.run_id, row.stage, sa.func.count(), sa.func.sum(row.finished - row.started)).where(row.run_id.in_(ids))
    for run, stage, count, seconds in session.execute(spent.group_by(row.run_id, row.stage)):
        family.add_metric([run, stage], count, seconds)
    return family


def _step_metrics(session: Session, ids: list[str]) -> Family:
    """Everything that the trainer said of a run's newest step, under the name it has there."""
    family = GaugeMetricFamily("lego_rl_step_metric", "A metric of the newest step.", labels=["run", "metric"])
    for run in ids:
        newest = sa.select(sa.func.max(Metric.step)).where(Metric.run_id == run).scalar_subquery()
        found = sa.select(Metric.key, Metric.value).where(Metric.run_id == run, Metric.step == newest, Metric.value.is_not(None))
        for key, value in session.execute(found):
            family.add_metric([run, key], value or 0.0)
    return family
