"""The runner's half of the admission table, row by row."""

import itertools

import pytest

from sandbox.integrity.verdict import Grade, Verdict
from sandbox.runner.outcomes import Facts, decide
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination


def facts(stage: Stage, grade: Grade | None = None, **fields: object) -> Facts:
    return Facts(stage=stage, verdict=Verdict(grade=grade) if grade else None, **fields)  # type: ignore[arg-type]


SCORED = [
    (facts(Stage.DONE, Grade.PASSED, harness_started=True), 1, Termination.COMPLETED),
    (facts(Stage.DONE, Grade.FAILED, harness_started=True), 0, Termination.COMPLETED),
    (facts(Stage.DONE, Grade.TAMPERED, harness_started=True), 0, Termination.TAMPERED),
    (facts(Stage.DONE, Grade.UNUSABLE, harness_started=True), 0, Termination.AGENT_FAULT),
    (facts(Stage.DONE, Grade.PASSED, harness_started=True, fault="disk full"), 1, Termination.AGENT_FAULT),
    (facts(Stage.DONE, Grade.FAILED, harness_started=True, fault="disk full"), 0, Termination.AGENT_FAULT),
    (facts(Stage.COLLECT, harness_started=True, tree_broken="too large", error="too large"), 0, Termination.AGENT_FAULT),
    (facts(Stage.VERIFIER, Grade.PASSED, harness_started=True, error="timed out", fault="2 processes killed"), 1, Termination.AGENT_FAULT),
    (facts(Stage.AGENT, Grade.PASSED, harness_started=True, timed_out=True), 1, Termination.COMPLETED),
]
FAILED = [
    (facts(Stage.SANDBOX_SETUP, error="no space"), Cause.SANDBOX_SETUP),
    (facts(Stage.SANDBOX_SETUP, timed_out=True), Cause.SANDBOX_SETUP),
    (facts(Stage.AGENT_SETUP, error="no parent"), Cause.AGENT_SETUP),
    (facts(Stage.AGENT, error="cannot enter the sandbox"), Cause.AGENT_SETUP),
    (facts(Stage.AGENT, harness_started=True, timed_out=True), Cause.AGENT_TIMEOUT),
    (facts(Stage.AGENT, harness_started=True, error="spawner lost"), Cause.RUNNER_LOST),
    (facts(Stage.COLLECT, harness_started=True, error="spawner lost", lost=True), Cause.RUNNER_LOST),
    (facts(Stage.VERIFIER, harness_started=True, error="spawner lost", lost=True), Cause.RUNNER_LOST),
    (facts(Stage.SANDBOX_SETUP, error="spawner lost", lost=True), Cause.SANDBOX_SETUP),
    (facts(Stage.COLLECT, harness_started=True, error="disk"), Cause.VERIFIER),
    (facts(Stage.VERIFIER, harness_started=True, error="no sandbox"), Cause.VERIFIER),
    (facts(Stage.VERIFIER, harness_started=True, error="timed out", fault="2 processes killed"), Cause.VERIFIER),
    (facts(Stage.VERIFIER, harness_started=True, timed_out=True), Cause.VERIFIER_TIMEOUT),
    (facts(Stage.DONE, Grade.NOT_RUN, harness_started=True), Cause.VERIFIER),
    (facts(Stage.DONE, Grade.TIMEOUT, harness_started=True), Cause.VERIFIER_TIMEOUT),
    (facts(Stage.DONE, harness_started=True), Cause.VERIFIER),
    (facts(Stage.DONE, Grade.PASSED, cancelled=True), Cause.CANCELLED),
]


@pytest.mark.parametrize(("given", "reward", "termination"), SCORED)
def test_scored(given: Facts, reward: int, termination: Termination) -> None:
    outcome = decide(given)
    assert isinstance(outcome, Scored)
    assert (outcome.reward, outcome.termination) == (reward, termination)


@pytest.mark.parametrize(("given", "cause"), FAILED)
def test_failed(given: Facts, cause: Cause) -> None:
    outcome = decide(given)
    assert isinstance(outcome, Failed)
    assert (outcome.cause, outcome.stage) == (cause, given.stage)


def test_only_a_passed_check_gives_a_reward() -> None:
    for stage, grade, timed_out, cancelled, started in itertools.product(Stage, [None, *Grade], *[(False, True)] * 3):
        outcome = decide(
            facts(stage, grade, timed_out=timed_out, cancelled=cancelled, harness_started=started, tree_broken="x" * timed_out)
        )
        if isinstance(outcome, Scored) and outcome.reward == 1:
            assert grade is Grade.PASSED and not cancelled


def test_what_was_graded_keeps_its_grade_whatever_else_happened() -> None:
    """A time-out, a lost harness or a fault of the agent's hides no verdict."""
    grades = (Grade.PASSED, Grade.FAILED)
    both = (False, True)
    for stage, grade, fault, timed_out, lost in itertools.product(Stage, grades, ("", "disk full"), both, both):
        outcome = decide(facts(stage, grade, harness_started=True, fault=fault, timed_out=timed_out, lost=lost, error="x"))
        assert isinstance(outcome, Scored)
        termination = Termination.AGENT_FAULT if fault else Termination.COMPLETED
        assert (outcome.reward, outcome.termination) == (int(grade is Grade.PASSED), termination)
