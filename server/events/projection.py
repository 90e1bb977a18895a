"""What events mean for the tables: a run, its steps, groups and trials.

The result does not depend on how batches of different sources interleave. Each source is judged by its own order; where two sources
speak of one trial, the further stage shows, and only an outcome ends it. What cannot be applied is a problem of the event and changes
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..db.models import (
    ArchiveRow,
    Base,
    CaptureRow,
    EvaluationDone,
    FindingRow,
    Group,
    LogRow,
    MachineRow,
    Metric,
    RegradeRow,
    Run,
    StageTimingRow,
    StepDone,
    Trial,
)
from ..schemas.events import (
    ArchiveBody,
    CaptureBody,
    EvaluationBody,
    Event,
    FindingBody,
    GroupBody,
    LogBody,
    MachineBody,
    OutcomeBody,
    RegradeBody,
    ResumedBody,
    RunStateBody,
    StageTimingBody,
    StepBody,
    TrialBody,
    WaitingBody,
)
from ..schemas.outcome import Cause, Fault, Scored, Stage
from ..schemas.states import RUN_TRANSITIONS, TERMINAL_RUN_STATES, TERMINAL_TRIAL_STATES, TRIAL_TRANSITIONS, Phase, RunState, TrialState

ORDER = {stage: n for n, stage in enumerate(Stage)}


class _Problem(Exception):
    """The event cannot be applied."""


class Projection:
    """Applies the events of one batch within the caller's transaction, which holds the run's lock."""

    def __init__(self, session: Session, run: Run) -> None:
        self._session = session
        self._run = run
        self._trials: dict[str, Trial] = {}
        self._added: set[tuple[type[Base], tuple[object, ...]]] = set()

    def apply(self, events: Sequence[Event]) -> dict[int, str]:
        """Returns seq → problem of the events that could not be applied."""
        self._load_trials({event.body.trial_id for event in events if hasattr(event.body, "trial_id")})
        if self._run.state is RunState.STALLED:
            self._run.state, self._run.reason = RunState.RUNNING, ""
        problems: dict[int, str] = {}
        with self._session.no_autoflush:
            for event in events:
                try:
                    self._apply(event)
                except _Problem as problem:
                    problems[event.seq] = str(problem)
        self._session.flush()
        return problems

    def _apply(self, event: Event) -> None:
        match event.body:
            case RunStateBody() as body:
                self._run_state(body)
            case WaitingBody() as body:
                if self._run.state is not RunState.STOPPING and self._run.state not in TERMINAL_RUN_STATES:
                    self._run.reason = _clean(body.reason)
            case ResumedBody() as body:
                self._resumed(event, body)
            case StepBody() as body:
                self._once(StepDone, (body.step,), f"step {body.step}", step=body.step, time=event.time)
                self._metrics(body.step, body.metrics)
                self._started_running()
            case EvaluationBody() as body:
                counts = body.model_dump(include={"step", "resolved", "executed", "total"})
                self._once(EvaluationDone, (body.step,), f"the evaluation after step {body.step}", time=event.time, **counts)
                found = body.metrics | {"resolved": body.resolved, "executed": body.executed, "total": body.total}
                # The step that it follows has metrics of the same names: its turns, its harnesses.
                self._metrics(body.step, {f"evaluation/{key}": value for key, value in found.items()})
            case GroupBody() as body:
                self._once(Group, (body.group_id,), f"group {body.group_id}", time=event.time, **body.model_dump(exclude={"type"}))
                self._started_running()
            case MachineBody() as body:
                findings = [_plain(finding.model_dump(mode="json")) for finding in body.findings]
                self._session.merge(
                    MachineRow(run_id=self._run.run_id, host=body.host, findings=findings, facts=body.facts, time=event.time)
                )
            case FindingBody() as body:
                self._finding(event, body)
            case LogBody() as body:
                self._session.merge(LogRow(run_id=self._run.run_id, name=body.name, path=_clean(body.path)))
            case _:
                self._apply_to_trial(event)

    def _apply_to_trial(self, event: Event) -> None:
        match event.body:
            case TrialBody() as body:
                self._trial(event, body)
            case OutcomeBody() as body:
                self._outcome(event, body)
            case StageTimingBody() as body:
                self._add(StageTimingRow, source=event.source, seq=event.seq, **body.model_dump(exclude={"type"}))
            case CaptureBody() as body:
                self._once(CaptureRow, (body.trial_id,), f"the capture of {body.trial_id}", **_plain(body.model_dump(exclude={"type"})))
            case ArchiveBody() as body:
                self._once(ArchiveRow, (body.trial_id,), f"the diff of {body.trial_id}", **_plain(body.model_dump(exclude={"type"})))
            case RegradeBody() as body:
                self._regrade(event, body)

    def _run_state(self, body: RunStateBody) -> None:
        """A producer may say that the run is under way. How it ended is the server's to find out; what the producer says is kept."""
        if body.state in TERMINAL_RUN_STATES:
            self._run.reported = _clean(f"{body.state}: {body.reason}" if body.reason else body.state)
        elif body.state in RUN_TRANSITIONS[self._run.state]:
            self._run.state = body.state
        elif body.state is not self._run.state and self._run.state not in TERMINAL_RUN_STATES:
            raise _Problem(f"the run is {self._run.state} and cannot become {body.state}")

    def _resumed(self, event: Event, body: ResumedBody) -> None:
        """Results of later steps go, their trials stay as superseded. So does an evaluation of this very step that was not finished."""
        run_id, session = self._run.run_id, self._session
        session.flush()
        for model in (StepDone, EvaluationDone, Metric):
            session.execute(sa.delete(model).where(model.run_id == run_id, model.step > body.step))
        evaluated = session.get(EvaluationDone, (run_id, body.step)) is not None
        lost_evaluation = Group.step > body.step if evaluated else Group.step >= body.step
        lost = sa.or_(
            sa.and_(Group.phase == Phase.TRAIN, Group.step > body.step),
            sa.and_(Group.phase == Phase.EVAL, lost_evaluation),
        )
        groups = session.scalars(sa.select(Group).where(Group.run_id == run_id, lost)).all()
        for group in groups:
            group.phase = Phase.SUPERSEDED
        ids = [group.group_id for group in groups]
        for trial in session.scalars(sa.select(Trial).where(Trial.run_id == run_id, Trial.group_id.in_(ids), Trial.kind == "")):
            trial.kind, trial.cause, trial.failed_stage = TrialState.FAILED, Cause.CANCELLED, trial.stage
            trial.detail, trial.finished = "the trainer died, and the step was done again", event.time
            _show(trial)

    def _started_running(self) -> None:
        if self._run.state is RunState.STARTING:
            self._run.state = RunState.RUNNING

    def _trial(self, event: Event, body: TrialBody) -> None:
        trial = self._of(body.trial_id)
        before = trial.reported.get(event.source)
        state = TrialState(before[0]) if before else None
        if state and state is not body.state and body.state not in TRIAL_TRANSITIONS[state]:
            raise _Problem(f"{event.source} said that trial {body.trial_id} is {state}, it cannot become {body.state}")
        trial.reported = dict(sorted((trial.reported | {event.source: [body.state, body.stage]}).items()))
        if body.group_id is not None:
            trial.group_id = body.group_id
        if body.sample is not None:
            trial.sample = body.sample
        if body.state is not TrialState.QUEUED:
            trial.started = min(event.time, trial.started or math.inf)
        _show(trial)

    def _outcome(self, event: Event, body: OutcomeBody) -> None:
        trial = self._of(body.trial_id)
        if trial.kind:
            raise _Problem(f"trial {body.trial_id} has an outcome already")
        outcome = body.outcome
        trial.kind = outcome.kind
        trial.detail = _clean(outcome.detail)
        trial.finished = event.time
        if isinstance(outcome, Scored):
            trial.reward, trial.termination = outcome.reward, outcome.termination
        else:
            trial.cause, trial.failed_stage = outcome.cause, outcome.stage
        trial.evidence = [_clean(line) for line in outcome.evidence]
        _show(trial)

    def _regrade(self, event: Event, body: RegradeBody) -> None:
        trial = self._trials.get(body.trial_id)
        if trial is None:
            raise _Problem(f"there is no trial {body.trial_id} to regrade")
        self._session.flush()
        row = RegradeRow(
            run_id=self._run.run_id,
            trial_id=body.trial_id,
            verifier=body.verifier,
            inputs=body.inputs,
            reward=body.outcome.reward,
            outcome=_deep(body.outcome.model_dump(mode="json")),
            time=event.time,
        )
        self._session.merge(row)  # said again, it is the newest verdict again

    def _finding(self, event: Event, body: FindingBody) -> None:
        self._add(
            FindingRow,
            finding_id=f"{self._run.run_id}.{event.source}.{event.seq}",
            detector=body.detector,
            title=_clean(body.title),
            detail="" if body.step is None else f"at step {body.step}",
            fault=Fault.UNKNOWN,
            evidence=[{"id": _clean(id), "text": "", "values": {}} for id in body.evidence],
            time=event.time,
        )

    def _metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._session.flush()
        known = set(self._session.scalars(sa.select(Metric.key).where(Metric.run_id == self._run.run_id, Metric.step == step)))
        for key, value in metrics.items():
            if key not in known:
                self._add(Metric, step=step, key=key, value=value if math.isfinite(value) else None)

    def _once(self, model: type[Base], key: tuple[object, ...], what: str, **values: Any) -> None:
        """Insert a row whose key may be there already: the first one counts."""
        if (model, key) in self._added or self._session.get(model, (self._run.run_id, *key)) is not None:
            raise _Problem(f"{what} was reported before")
        self._added.add((model, key))
        self._add(model, **values)

    def _add(self, model: type[Base], **values: Any) -> None:
        self._session.add(model(run_id=self._run.run_id, **values))

    def _load_trials(self, ids: set[str]) -> None:
        found = self._session.scalars(sa.select(Trial).where(Trial.run_id == self._run.run_id, Trial.trial_id.in_(ids)))
        self._trials = {trial.trial_id: trial for trial in found}

    def _of(self, trial_id: str) -> Trial:
        trial = self._trials.get(trial_id)
        if trial is None:
            trial = Trial(
                run_id=self._run.run_id,
                trial_id=trial_id,
                state=TrialState.QUEUED,
                stage=Stage.QUEUED,
                reported={},
                kind="",
                detail="",
                evidence=[],
            )
            self._trials[trial_id] = trial
            self._session.add(trial)
        return trial


def _show(trial: Trial) -> None:
    """State and stage of a trial, from its outcome and from what each source said last."""
    if trial.kind:
        trial.state, trial.stage = TrialState(trial.kind), Stage.DONE
        return
    said = [(TrialState(state), Stage(stage)) for state, stage in trial.reported.values()]
    # A source that has finished its part still leaves the trial running until the outcome is admitted.
    under_way = any(state is TrialState.RUNNING or state in TERMINAL_TRIAL_STATES for state, _ in said)
    trial.state = TrialState.RUNNING if under_way else TrialState.QUEUED
    trial.stage = max((stage for _, stage in said), key=ORDER.__getitem__)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _clean(value) if isinstance(value, str) else value for key, value in values.items()}


def _deep(values: dict[str, Any]) -> dict[str, Any]:
    return {key: [_clean(line) for line in value] if isinstance(value, list) else value for key, value in _plain(values).items()}


def _clean(text: str) -> str:
    """PostgreSQL stores every character but NUL."""
    return text.replace("\x00", "�")
