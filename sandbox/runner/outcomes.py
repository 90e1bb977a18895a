"""From the facts of a trial to its outcome: one pure function, the runner's half of the admission table.

The trainer's half (turn cap, context overflow, no model call at all, proxy and engine errors) is decided there, from the capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sandbox.integrity.verdict import Grade, Verdict
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination


@dataclass(frozen=True, slots=True)
class Facts:
    """What the host saw. The harness's exit code is not among them: once it ran, its tree is graded whatever it said."""

    stage: Stage
    """Where the trial ended; DONE when every stage ran."""
    error: str = ""
    """What ended it early, in the words of the part that failed."""
    timed_out: bool = False
    """The deadline of `stage` passed."""
    cancelled: bool = False
    harness_started: bool = False
    lost: bool = False
    """The process that owns the sandboxes is gone, and everything in them."""
    fault: str = ""
    """What the agent did to its own sandbox (out of memory, disk full, …). It is no failure of the stage: what was left is graded."""
    tree_broken: str = ""
    """Why nothing could be collected, by the agent's doing."""
    verdict: Verdict | None = None
    evidence: list[str] = field(default_factory=list)


_SETUP = {Stage.QUEUED: Cause.SANDBOX_SETUP, Stage.IMAGE: Cause.IMAGE, Stage.SANDBOX_SETUP: Cause.SANDBOX_SETUP}


def decide(facts: Facts) -> Scored | Failed:
    """The outcome. A verdict counts only when the trial was not cancelled; without one, the stage says whose failure it was."""
    if facts.cancelled:
        return _failed(facts, Cause.CANCELLED)
    if facts.verdict is not None and facts.verdict.grade in _SCORED:
        return _scored(facts, facts.verdict)
    if facts.tree_broken:
        return Scored(reward=0, termination=Termination.AGENT_FAULT, detail=facts.tree_broken)
    match facts.stage:
        case Stage.QUEUED | Stage.IMAGE | Stage.SANDBOX_SETUP:
            return _failed(facts, _SETUP[facts.stage])
        case Stage.AGENT_SETUP:
            return _failed(facts, Cause.AGENT_SETUP)
        case _ if facts.lost:
            return _failed(facts, Cause.RUNNER_LOST)
        case Stage.AGENT if not facts.harness_started:
            return _failed(facts, Cause.AGENT_SETUP)
        case Stage.AGENT:
            return _failed(facts, Cause.AGENT_TIMEOUT if facts.timed_out else Cause.RUNNER_LOST)
    timed_out = facts.timed_out or (facts.verdict is not None and facts.verdict.grade is Grade.TIMEOUT)
    return _failed(facts, Cause.VERIFIER_TIMEOUT if timed_out else Cause.VERIFIER)


_SHOWN = 5
_SCORED = {Grade.PASSED, Grade.FAILED, Grade.TAMPERED, Grade.UNUSABLE}


def _scored(facts: Facts, verdict: Verdict) -> Scored:
    evidence = [*verdict.signs, *(f"put back for grading: {path}" for path in verdict.reverted[:_SHOWN])]
    match verdict.grade:
        case Grade.TAMPERED:
            return Scored(reward=0, termination=Termination.TAMPERED, detail=verdict.detail, evidence=evidence)
        case Grade.UNUSABLE:
            return Scored(reward=0, termination=Termination.AGENT_FAULT, detail=verdict.detail, evidence=evidence)
    termination = Termination.AGENT_FAULT if facts.fault else Termination.COMPLETED
    return Scored(reward=1 if verdict.grade is Grade.PASSED else 0, termination=termination, detail=facts.fault, evidence=evidence)


def _failed(facts: Facts, cause: Cause) -> Failed:
    detail = facts.error or (facts.verdict.detail if facts.verdict is not None else "")
    return Failed(stage=facts.stage, cause=cause, detail=detail, evidence=facts.evidence)
