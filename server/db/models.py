"""The tables. Times are Unix seconds. Nothing large lies here: captures are files that a row points to."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ..schemas.outcome import Stage
from ..schemas.states import Phase, RunState, TrialState

Json = dict[str, Any]


def _enum(kind: type[Any]) -> sa.Enum:
    """Stored as its value in a plain string column, so that a new member needs no migration."""
    return sa.Enum(kind, native_enum=False, create_constraint=False, length=40, values_callable=lambda e: [m.value for m in e])


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        Json: sa.JSON,
        list[str]: sa.JSON,
        list[Any]: sa.JSON,
        float: sa.Double,
        RunState: _enum(RunState),
        TrialState: _enum(TrialState),
        Stage: _enum(Stage),
        Phase: _enum(Phase),
    }
    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def _run_key() -> Mapped[str]:
    return mapped_column(sa.ForeignKey("runs.run_id", ondelete="CASCADE"), primary_key=True)


class PlanRow(Base):
    """A plan that was shown; a run starts from its digest."""

    __tablename__ = "plans"
    digest: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[Json]
    provenance: Mapped[Json]
    summary: Mapped[str]
    created: Mapped[float]


class Run(Base):
    __tablename__ = "runs"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    digest: Mapped[str] = mapped_column(sa.ForeignKey("plans.digest"))
    state: Mapped[RunState]
    reason: Mapped[str] = mapped_column(default="")
    problem: Mapped[str] = mapped_column(default="")
    reported: Mapped[str] = mapped_column(default="")
    """What the trainer itself said last about its end; the server decides from the facts."""
    token_sha256: Mapped[str]
    """Of the run's event token."""
    steps_expected: Mapped[int]
    created: Mapped[float] = mapped_column(index=True)
    started: Mapped[float | None]
    finished: Mapped[float | None]
    last_event: Mapped[float | None]
    """When the server last stored one, by its own clock."""


class EventSource(Base):
    """How far each source of a run is stored; locked while a batch is."""

    __tablename__ = "event_sources"
    run_id: Mapped[str] = _run_key()
    source: Mapped[str] = mapped_column(primary_key=True)
    stored: Mapped[int]


class EventRow(Base):
    __tablename__ = "events"
    run_id: Mapped[str] = _run_key()
    source: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]
    type: Mapped[str]
    body: Mapped[str] = mapped_column(sa.Text)
    """JSON as it arrived; numbers may be NaN."""
    problem: Mapped[str | None]
    """Why it could not be applied to the other tables."""


class StepDone(Base):
    __tablename__ = "steps"
    run_id: Mapped[str] = _run_key()
    step: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]


class Metric(Base):
    """`value` is NULL where the number was NaN or infinite."""

    __tablename__ = "metrics"
    run_id: Mapped[str] = _run_key()
    key: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]


class EvaluationDone(Base):
    __tablename__ = "evaluations"
    run_id: Mapped[str] = _run_key()
    step: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]
    resolved: Mapped[int]
    executed: Mapped[int]
    total: Mapped[int]


class Group(Base):
    __tablename__ = "groups"
    __table_args__ = (sa.Index("ix_groups_step", "run_id", "phase", "step"),)
    run_id: Mapped[str] = _run_key()
    group_id: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int]
    phase: Mapped[Phase]
    task: Mapped[str]
    harness: Mapped[str]
    size: Mapped[int]
    time: Mapped[float]


class Trial(Base):
    """`kind` is `scored` or `failed`; `reward` is NULL for a failed trial, so that no average can take it in."""

    __tablename__ = "trials"
    __table_args__ = (
        sa.Index("ix_trials_group", "run_id", "group_id"),
        sa.CheckConstraint("(kind = 'scored') = (reward IS NOT NULL)", name="ck_trials_reward"),
    )
    run_id: Mapped[str] = _run_key()
    trial_id: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str | None]
    sample: Mapped[int | None]
    state: Mapped[TrialState]
    stage: Mapped[Stage]
    reported: Mapped[Json]
    """Source → [state, stage] that it reported last: each source is judged by its own order, whatever arrives in between."""
    kind: Mapped[str] = mapped_column(default="")
    reward: Mapped[int | None]
    termination: Mapped[str | None]
    cause: Mapped[str | None]
    failed_stage: Mapped[str | None]
    detail: Mapped[str] = mapped_column(default="")
    evidence: Mapped[list[str]]
    started: Mapped[float | None]
    finished: Mapped[float | None]


class StageTimingRow(Base):
    """Keyed by the event that reported it: a stage may run twice."""

    __tablename__ = "stage_timings"
    __table_args__ = (sa.Index("ix_stage_timings_trial", "run_id", "trial_id"),)
    run_id: Mapped[str] = _run_key()
    source: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[str]
    stage: Mapped[Stage]
    started: Mapped[float]
    finished: Mapped[float]


class CaptureRow(Base):
    """`path` is relative to the run's directory."""

    __tablename__ = "captures"
    run_id: Mapped[str] = _run_key()
    trial_id: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str]
    size: Mapped[int]
    sha256: Mapped[str]
    turns: Mapped[int]
    branches: Mapped[int]
    sampled_tokens: Mapped[int]
    tool_calls: Mapped[int]
    malformed_turns: Mapped[int]


class ArchiveRow(Base):
    """The diff that a trial was graded from. `path` is relative to the run's directory."""

    __tablename__ = "archives"
    run_id: Mapped[str] = _run_key()
    trial_id: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str]
    size: Mapped[int]
    sha256: Mapped[str]


class RegradeRow(Base):
    """A further verdict on an archived diff; the first one stays with the trial. The newest one counts where verdicts are shown.

    `outcome` is the whole `Scored` document: what could not be graded leaves no row.
    """

    __tablename__ = "regrades"
    run_id: Mapped[str] = _run_key()
    trial_id: Mapped[str] = mapped_column(primary_key=True)
    verifier: Mapped[str] = mapped_column(primary_key=True)
    inputs: Mapped[str] = mapped_column(primary_key=True)
    reward: Mapped[int]
    outcome: Mapped[Json]
    time: Mapped[float]


class MachineRow(Base):
    """What a run's runner found last on its machine (`schemas.machine`)."""

    __tablename__ = "machines"
    run_id: Mapped[str] = _run_key()
    host: Mapped[str] = mapped_column(primary_key=True)
    findings: Mapped[list[Any]]
    facts: Mapped[Json]
    time: Mapped[float]


class FindingRow(Base):
    """`fault` is a `Fault`; `evidence` a list of Evidence documents."""

    __tablename__ = "findings"
    finding_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.run_id", ondelete="CASCADE"), index=True)
    detector: Mapped[str]
    title: Mapped[str]
    detail: Mapped[str]
    fault: Mapped[str]
    evidence: Mapped[list[Any]]
    time: Mapped[float]


class ReviewRow(Base):
    """A person's decisions, all kept; the newest one counts."""

    __tablename__ = "reviews"
    review_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    finding_id: Mapped[str] = mapped_column(sa.ForeignKey("findings.finding_id", ondelete="CASCADE"), index=True)
    verdict: Mapped[str]
    note: Mapped[str]
    time: Mapped[float]


class CheckRow(Base):
    """One pre-flight. `report` is NULL while it runs."""

    __tablename__ = "checks"
    check_id: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[Json]
    report: Mapped[Json | None]
    created: Mapped[float]


class ProcessRow(Base):
    """The ownership ledger. (boot_id, pid, start_ticks) names one process for good; nothing else is ever signalled."""

    __tablename__ = "processes"
    run_id: Mapped[str] = _run_key()
    boot_id: Mapped[str] = mapped_column(primary_key=True)
    pid: Mapped[int] = mapped_column(primary_key=True)
    start_ticks: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    role: Mapped[str]
    started: Mapped[float]


class LogRow(Base):
    """`path` is relative to the run's directory."""

    __tablename__ = "logs"
    run_id: Mapped[str] = _run_key()
    name: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str]
