"""From SQL to the evidence pack."""

from __future__ import annotations

from itertools import groupby

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..db.models import CaptureRow, Group, Trial
from ..runs.trials import outcome_of
from ..schemas.states import Phase
from .pack import GroupFacts, Pack, TrialFacts


def load_pack(session: Session, run_id: str) -> Pack:
    """Every ended trial of the run that belongs to a group and counts."""
    rows = session.execute(
        sa.select(Trial, Group, CaptureRow.turns, CaptureRow.tool_calls)
        .join(Group, (Group.run_id == Trial.run_id) & (Group.group_id == Trial.group_id))
        .outerjoin(CaptureRow, (CaptureRow.run_id == Trial.run_id) & (CaptureRow.trial_id == Trial.trial_id))
        .where(Trial.run_id == run_id, Trial.kind != "", Group.phase != Phase.SUPERSEDED)
        .order_by(Group.step, Group.group_id, Trial.sample, Trial.trial_id)
    ).all()
    found: dict[Phase, list[GroupFacts]] = {Phase.TRAIN: [], Phase.EVAL: []}
    for _, members in groupby(rows, key=lambda row: row[1].group_id):
        trials = list(members)
        group = trials[0][1]
        facts = tuple(
            TrialFacts(trial.trial_id, group.group_id, group.step, outcome, turns, calls)
            for trial, _, turns, calls in trials
            if (outcome := outcome_of(trial)) is not None
        )
        found[group.phase].append(GroupFacts(group.group_id, group.task, group.step, facts))
    return Pack(run_id, tuple(found[Phase.TRAIN]), tuple(found[Phase.EVAL]))
