"""Control-plane answers as plain text, for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from server.schemas.api import HarnessStatus, Point, RunStatus, RunSummary, StepForming
from server.schemas.checks import CheckReport, Diagnosis, Level, Plan
from server.schemas.hints import HINTS
from server.schemas.outcome import Cause
from server.schemas.states import Phase

BLOCKS = "▁▂▃▄▅▆▇█"
MARK = {Level.OK: "ok  ", Level.WARNING: "WARN", Level.ERROR: "FAIL", Level.SKIPPED: "skip"}


def sparkline(values: Sequence[float]) -> str:
    """One block per value; rates lie between 0 and 1, so the scale is fixed and two lines can be compared."""
    return "".join(BLOCKS[min(len(BLOCKS) - 1, max(0, int(value * len(BLOCKS))))] for value in values)


def report(checks: CheckReport) -> Iterator[str]:
    for check in checks.checks:
        yield f"{MARK[check.level]}  {check.where}: {check.message}" + (f"\n      → {check.fix}" if check.fix else "")
    yield checks.summary


def plan(plan: Plan) -> Iterator[str]:
    """What the run will do, what differs from the defaults and where each value came from, and the digest that starts it."""
    yield plan.summary
    for field, origin in plan.provenance.items():
        if origin != "default":
            yield f"  {field} = {value_at(plan.spec, field)}  ({origin})"
    yield f"plan {plan.digest}"


def value_at(spec: object, field: str) -> object:
    """The value of a dotted field; list items are addressed by number. None when the field is not there."""
    for part in field.split("."):
        if isinstance(spec, dict):
            spec = spec.get(part)
        elif isinstance(spec, list) and part.isdecimal() and int(part) < len(spec):
            spec = spec[int(part)]
        else:
            return None
    return spec


def runs(summaries: Sequence[RunSummary]) -> Iterator[str]:
    if not summaries:
        yield "no runs yet: start one with `rl run`"
    for run in summaries:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
        failed = f", {run.failed} failed" if run.failed else ""
        yield f"{run.run_id}  {run.state:<9}  {run.steps_done}/{run.steps_expected} steps, {run.trials} trials{failed}  {when}  {run.name}"


def status(run: RunStatus) -> Iterator[str]:
    yield f"{run.run_id}  {run.state}  {run.summary}"
    if run.train_reward:
        yield f"  train reward  {sparkline([p.value for p in run.train_reward])}  {run.train_reward[-1].value:.2f}"
    for point in run.held_out:
        yield f"  held-out after step {point.step}: {held_out(point)}"
    if run.forming:
        yield f"  now: {forming(run.forming)}"
    if run.outcomes:
        yield "  outcomes: " + ", ".join(f"{name} {count}" for name, count in sorted(run.outcomes.items()))
    for row in run.harnesses:
        yield f"  in {row.harness}: " + "; ".join(_in_harness(row))
    for cause in (cause for cause in Cause if cause in run.outcomes):
        yield f"  {cause}: look at {HINTS[cause]}"
    if run.problem:
        yield f"  problem: {run.problem}"


def _in_harness(row: HarnessStatus) -> Iterator[str]:
    yield f"{row.groups} groups, {row.trials} trials, {row.failed} failed"
    for what, points in (("training", row.train_reward), ("held-out", row.held_out)):
        if points:
            yield f"{what} {points[0].value:.2f}" + (f" → {points[-1].value:.2f}" if len(points) > 1 else "")
    if row.fidelity is not None:
        yield f"log-probs differ by {row.fidelity:.1e}"
    yield ", ".join(f"{name} {count}" for name, count in row.outcomes.items())


def held_out(point: Point) -> str:
    interval = f" [{point.low:.2f}, {point.high:.2f}]" if point.low is not None and point.high is not None else ""
    return f"{point.value:.3f} of {point.n} solved{interval}"


def forming(step: StepForming) -> str:
    what = f"step {step.step}" if step.phase is Phase.TRAIN else f"evaluation after step {step.step}"
    causes = ", ".join(f"{count} {cause}" for cause, count in step.failures.items())
    failed = f", {step.failed} failed: {causes}" if step.failed else ""
    return f"{what}: {step.done}/{step.expected} trials{failed}"


def diagnosis(found: Diagnosis) -> Iterator[str]:
    yield found.summary
    for finding in found.findings:
        verdict = f" [{finding.verdict}]" if finding.verdict else ""
        yield f"{finding.id}  {finding.title}{verdict} ({finding.detector}, {finding.fault})"
        yield f"  {finding.detail}"
        for row in finding.evidence:
            yield f"  - {row.id}: {row.text}"
    if found.explanation:
        yield found.explanation
    if found.findings:
        yield "candidates only: decide with `rl review FINDING confirm|reject`"
