"""Queries for archived diffs and second verdicts. The first verdict of a trial is never touched; where both are shown, it says which."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..db.models import ArchiveRow, Group, RegradeRow, Trial
from ..schemas.api import Point
from ..schemas.outcome import Cause, Scored
from ..schemas.regrade import ArchivedTrial, Change, RegradeReport, Verifier
from ..schemas.states import Phase
from .status import share_point
from .trials import outcome_of

GRADED_AGAIN = (Cause.VERIFIER, Cause.VERIFIER_TIMEOUT)
"""Failures of grading alone: the agent's work is whole, so another grading may give the verdict that is missing."""


def archived_trials(session: Session, run_id: str, steps: list[int]) -> list[ArchivedTrial]:
    """Ended trials with a diff, of all steps or of those named; in order of step, group and sample."""
    query = (
        sa.select(Trial, Group, ArchiveRow)
        .join(Group, (Group.run_id == Trial.run_id) & (Group.group_id == Trial.group_id))
        .join(ArchiveRow, (ArchiveRow.run_id == Trial.run_id) & (ArchiveRow.trial_id == Trial.trial_id))
        .where(Trial.run_id == run_id, Group.phase != Phase.SUPERSEDED)
        .where(sa.or_(Trial.kind == "scored", Trial.cause.in_(GRADED_AGAIN)))
        .order_by(Group.step, Group.group_id, Trial.sample, Trial.trial_id)
    )
    if steps:
        query = query.where(Group.step.in_(steps))
    return [
        ArchivedTrial(
            trial_id=trial.trial_id,
            task=group.task,
            harness=group.harness,
            step=group.step,
            phase=group.phase,
            path=archive.path,
            size=archive.size,
            sha256=archive.sha256,
            outcome=outcome,
        )
        for trial, group, archive in session.execute(query)
        if (outcome := outcome_of(trial)) is not None
    ]


def regrade_report(session: Session, run_id: str, verifier: Verifier) -> RegradeReport:
    newest = newest_regrades(run_id, verifier)
    rows = session.execute(
        sa.select(Trial, Group, newest.c.outcome)
        .join(Group, (Group.run_id == Trial.run_id) & (Group.group_id == Trial.group_id))
        .join(newest, newest.c.trial_id == Trial.trial_id)
        .where(Trial.run_id == run_id, Group.phase != Phase.SUPERSEDED)
        .order_by(Group.step, Group.group_id, Trial.sample, Trial.trial_id)
    ).all()
    changes = [
        Change(
            trial_id=trial.trial_id,
            task=group.task,
            step=group.step,
            phase=group.phase,
            first=first,
            again=Scored.model_validate(again),
        )
        for trial, group, again in rows
        if (first := outcome_of(trial)) is not None
    ]
    compared = [change for change in changes if isinstance(change.first, Scored)]
    changed = [change for change in compared if isinstance(change.first, Scored) and change.first.reward != change.again.reward]
    agreed = len(compared) - len(changed)
    return RegradeReport(
        run_id=run_id,
        verifier=verifier,
        regraded=len(changes),
        compared=len(compared),
        agreed=agreed,
        agreement=round(agreed / len(compared), 6) if compared else None,
        changed=changed,
        newly_graded=[change for change in changes if change not in compared],
    )


def newest_regrades(run_id: str, verifier: Verifier = "separate") -> sa.Subquery:
    """Columns `trial_id`, `reward`, `outcome`: the newest verdict on each regraded trial."""
    order = sa.func.row_number().over(partition_by=RegradeRow.trial_id, order_by=(RegradeRow.time.desc(), RegradeRow.inputs))
    ranked = (
        sa.select(RegradeRow.trial_id, RegradeRow.reward, RegradeRow.outcome, order.label("rank"))
        .where(RegradeRow.run_id == run_id, RegradeRow.verifier == verifier)
        .subquery()
    )
    return sa.select(ranked.c.trial_id, ranked.c.reward, ranked.c.outcome).where(ranked.c.rank == 1).subquery()


def regraded_points(session: Session, run_id: str, phase: Phase) -> dict[int, Point]:
    """Step → solve rate with the newest regrade in place of each first verdict, of steps with a regraded trial.

    In training over the trials with a verdict, in an evaluation over all ended ones, as the curves of first verdicts do.
    """
    newest = newest_regrades(run_id)
    reward = sa.func.coalesce(newest.c.reward, Trial.reward)
    counted = sa.func.count(reward) if phase is Phase.TRAIN else sa.func.count()
    rows = session.execute(
        sa.select(Group.step, sa.func.coalesce(sa.func.sum(reward), 0), counted)
        .join(Group, (Group.run_id == Trial.run_id) & (Group.group_id == Trial.group_id))
        .outerjoin(newest, newest.c.trial_id == Trial.trial_id)
        .where(Trial.run_id == run_id, Trial.kind != "", Group.phase == phase)
        .group_by(Group.step)
        .having(sa.func.count(newest.c.reward) > 0)
        .order_by(Group.step)
    )
    return {step: share_point(step, solved, n) for step, solved, n in rows}


def regrades_of(session: Session, run_id: str, trial_id: str) -> list[tuple[str, float, Scored]]:
    """Every further verdict on one trial: verifier, Unix seconds, verdict; the newest first."""
    query = sa.select(RegradeRow).where(RegradeRow.run_id == run_id, RegradeRow.trial_id == trial_id).order_by(RegradeRow.time.desc())
    return [(row.verifier, row.time, Scored.model_validate(row.outcome)) for row in session.scalars(query)]
