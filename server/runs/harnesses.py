"""A mixed run by harness: what each one played, what came of it, and how well its log-probabilities agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..db.models import Group, Metric, StepDone, Trial
from ..schemas.api import HarnessStatus, Point
from ..schemas.states import Phase
from .stats import wilson


@dataclass(slots=True)
class _Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    solved: Counter[tuple[Phase, int]] = field(default_factory=Counter)
    counted: Counter[tuple[Phase, int]] = field(default_factory=Counter)
    """(phase, step) → rollouts in the share's denominator: scored ones in training, all in an evaluation."""

    def points(self, phase: Phase) -> list[Point]:
        made = []
        for step, n in sorted((step, n) for (of, step), n in self.counted.items() if of is phase):
            solved = self.solved[phase, step]
            low, high = wilson(solved, n)
            made.append(Point(step=step, value=solved / n if n else 0.0, n=n, low=low, high=high))
        return made


def harness_rows(session: Session, run_id: str) -> list[HarnessStatus]:
    """One row for each harness of a run that played in more than one; empty for any other run. Lost steps do not count."""
    of_run = (Group.run_id == run_id, Group.phase != Phase.SUPERSEDED)
    begun = session.execute(sa.select(Group.harness, sa.func.count()).where(*of_run).group_by(Group.harness))
    groups = {harness: count for harness, count in begun}
    if len(groups) < 2:
        return []
    kinds = (Group.harness, Group.phase, Group.step, Trial.kind, sa.func.coalesce(Trial.termination, Trial.cause))
    rows = session.execute(
        sa.select(*kinds, sa.func.count(), sa.func.sum(Trial.reward))
        .join(Trial, sa.and_(Group.run_id == Trial.run_id, Group.group_id == Trial.group_id))
        .where(*of_run, Trial.kind != "")
        .group_by(*kinds)
    )
    tallies = {name: _Tally() for name in groups}
    for harness, phase, step, kind, outcome, count, solved in rows:
        tally = tallies[harness]
        tally.outcomes[outcome] += count
        tally.failed += count * (kind == "failed")
        tally.solved[phase, step] += int(solved or 0)
        tally.counted[phase, step] += count * (phase is Phase.EVAL or kind != "failed")
    last = sa.select(sa.func.max(StepDone.step)).where(StepDone.run_id == run_id).scalar_subquery()
    of_last = sa.select(Metric.key, Metric.value).where(Metric.run_id == run_id, Metric.step == last, Metric.key.like("lego/%"))
    metrics = {key: value for key, value in session.execute(of_last)}
    return [
        HarnessStatus(
            harness=name,
            groups=groups[name],
            trials=tally.outcomes.total(),
            failed=tally.failed,
            outcomes=dict(sorted(tally.outcomes.items())),
            train_reward=tally.points(Phase.TRAIN),
            held_out=tally.points(Phase.EVAL),
            fidelity=metrics.get(f"lego/fidelity/{name}/mean_abs"),
            turns=metrics.get(f"lego/harness/{name}/turns/mean"),
        )
        for name, tally in sorted(tallies.items())
    ]
