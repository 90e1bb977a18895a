"""What the MCP tools answer: a client hands it to its model as compact JSON, so it is small and carries a sentence for people."""

from __future__ import annotations

from pydantic import BaseModel

from server.schemas.api import CheckJob, RunStatus, RunSummary
from server.schemas.checks import Diagnosis, Level, Plan
from server.schemas.states import TERMINAL_RUN_STATES

from . import show

CURVE = 20
"""Newest points of a curve in an answer."""
EVIDENCE = 5
"""Evidence rows per finding in an answer."""


class Problem(BaseModel):
    level: str
    code: str
    where: str
    message: str
    fix: str


class CheckAnswer(BaseModel):
    summary: str
    check_id: str
    done: bool
    ok: bool | None
    problems: list[Problem]

    @classmethod
    def of(cls, job: CheckJob, note: str = "") -> CheckAnswer:
        if job.report is None:
            summary = f"{note}The checks are still running: ask check_status with this check_id."
            return cls(summary=summary, check_id=job.check_id, done=False, ok=None, problems=[])
        problems = [
            Problem(level=c.level, code=c.code, where=c.where, message=c.message, fix=c.fix)
            for c in job.report.checks
            if c.level in (Level.WARNING, Level.ERROR)
        ]
        return cls(summary=note + job.report.summary, check_id=job.check_id, done=True, ok=job.report.ok, problems=problems)


class PlanAnswer(BaseModel):
    summary: str
    digest: str
    expected_trials: int
    settings: dict[str, str]
    """Every field that is not at its default, with its value and where that came from."""

    @classmethod
    def of(cls, plan: Plan, note: str = "") -> PlanAnswer:
        settings = {f: f"{show.value_at(plan.spec, f)} ({origin})" for f, origin in plan.provenance.items() if origin != "default"}
        return cls(summary=note + plan.summary, digest=plan.digest, expected_trials=plan.expected_trials, settings=settings)


class HeldOut(BaseModel):
    after_step: int
    solve_rate: float
    rollouts: int


class RunAnswer(BaseModel):
    summary: str
    run_id: str
    state: str
    finished: bool
    steps_done: int
    steps_expected: int
    trials: int
    failed: int
    now: str
    train_reward: list[float]
    held_out: list[HeldOut]
    outcomes: dict[str, int]
    problem: str
    dashboard: str

    @classmethod
    def of(cls, run: RunStatus, dashboard: str) -> RunAnswer:
        return cls(
            summary=run.summary,
            run_id=run.run_id,
            state=run.state,
            finished=run.state in TERMINAL_RUN_STATES,
            steps_done=run.steps_done,
            steps_expected=run.steps_expected,
            trials=run.trials,
            failed=run.failed,
            now=show.forming(run.forming) if run.forming else "",
            train_reward=[round(point.value, 3) for point in run.train_reward[-CURVE:]],
            held_out=[HeldOut(after_step=p.step, solve_rate=round(p.value, 3), rollouts=p.n) for p in run.held_out[-CURVE:]],
            outcomes=run.outcomes,
            problem=run.problem,
            dashboard=dashboard,
        )


class RunLine(BaseModel):
    run_id: str
    name: str
    state: str
    steps_done: int
    steps_expected: int

    @classmethod
    def of(cls, run: RunSummary) -> RunLine:
        return cls(run_id=run.run_id, name=run.name, state=run.state, steps_done=run.steps_done, steps_expected=run.steps_expected)


class RunsAnswer(BaseModel):
    summary: str
    runs: list[RunLine]


class StartAnswer(BaseModel):
    summary: str
    run_id: str
    state: str
    dashboard: str


class FindingAnswer(BaseModel):
    finding_id: str
    detector: str
    title: str
    detail: str
    fault: str
    evidence: list[str]
    verdict: str | None


class DiagnosisAnswer(BaseModel):
    summary: str
    run_id: str
    findings: list[FindingAnswer]
    checked: list[str]

    @classmethod
    def of(cls, found: Diagnosis) -> DiagnosisAnswer:
        findings = [
            FindingAnswer(
                finding_id=f.id,
                detector=f.detector,
                title=f.title,
                detail=f.detail,
                fault=f.fault,
                evidence=[f"{row.id}: {row.text}" for row in f.evidence[:EVIDENCE]],
                verdict=f.verdict,
            )
            for f in found.findings
        ]
        return cls(summary=found.summary, run_id=found.run_id, findings=findings, checked=found.checked)


class Answer(BaseModel):
    """A sentence and the id that it is about."""

    summary: str
    id: str


class UrlAnswer(BaseModel):
    summary: str
    url: str
