"""Tasks as runs know them."""

from __future__ import annotations

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Query

from ..context import READ, Ctx
from ..db.models import Group, Trial
from ..schemas.outcome import Cause
from ..schemas.states import Phase
from ..schemas.tasks_record import TaskRecord, TaskTrial

router = APIRouter(prefix="/api/tasks", tags=["tasks"], dependencies=[READ])

EXAMPLES = 3


@router.get("")
def tasks(context: Ctx, run: Annotated[list[str] | None, Query()] = None) -> list[TaskRecord]:
    """Every task with a failed trial in the named runs, or in all, by name."""
    joined = (Group.run_id == Trial.run_id) & (Group.group_id == Trial.group_id)
    ended = [Trial.kind != "", Group.phase != Phase.SUPERSEDED, *([Trial.run_id.in_(run)] if run else [])]
    counts = sa.select(Group.task, Trial.cause, sa.func.count()).join(Trial, joined).where(*ended).group_by(Group.task, Trial.cause)
    newest = sa.func.row_number().over(partition_by=(Group.task, Trial.cause), order_by=(Trial.finished.desc(), Trial.trial_id))
    failed = sa.select(Group.task, Trial, newest.label("rank")).join(Trial, joined).where(*ended, Trial.kind == "failed").subquery()
    found: dict[str, TaskRecord] = {}
    with context.db.read() as session:
        for task, cause, count in session.execute(counts):
            record = found.setdefault(task, TaskRecord(task=task, trials=0, failed={}, examples=[]))
            record.trials += count
            if cause is not None:
                record.failed[Cause(cause)] = count
        rows = session.execute(sa.select(failed).where(failed.c.rank <= EXAMPLES).order_by(failed.c.task, failed.c.rank))
        for row in rows:
            examples = found[row.task].examples
            examples.append(TaskTrial(run_id=row.run_id, trial_id=row.trial_id, cause=Cause(row.cause), detail=row.detail))
    return [record for _, record in sorted(found.items()) if record.failed]
