from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from server.schemas.outcome import ADMISSION, Cause, Failed, Scored, Stage, Termination
from trainer.rollout.admission import admit, plays_again


@dataclass(frozen=True)
class Facts:
    policy_turns: int = 3
    turn_cap_hit: bool = False
    over_length: bool = False
    engine_error: str | None = None
    proxy_error: str | None = None


def scored(reward: int = 1, termination: Termination = Termination.COMPLETED) -> Scored:
    return Scored(reward=1 if reward else 0, termination=termination)


def failed(cause: Cause, stage: Stage = Stage.AGENT) -> Failed:
    return Failed(stage=stage, cause=cause)


OUTCOMES = st.one_of(
    st.builds(scored, st.integers(0, 1), st.sampled_from(list(Termination))), st.builds(failed, st.sampled_from(list(Cause)))
)
FACTS = st.builds(Facts, st.integers(0, 5), st.booleans(), st.booleans(), st.none() | st.just("down"), st.none() | st.just("bug"))


def test_a_graded_trial_stays_as_it_is() -> None:
    assert admit(scored(1), Facts()) == scored(1)
    assert admit(scored(0), Facts()) == scored(0)


def test_turn_cap_and_overflow_are_terminations_with_the_grade_kept() -> None:
    assert admit(scored(1), Facts(turn_cap_hit=True)) == scored(1, Termination.MAX_TURNS)
    assert admit(scored(0), Facts(over_length=True)) == scored(0, Termination.OVER_LENGTH)
    assert admit(scored(1), Facts(turn_cap_hit=True, over_length=True)) == scored(1, Termination.OVER_LENGTH)


def test_they_say_why_the_agent_stopped_whatever_its_sandbox_or_exit_code_shows() -> None:
    fault = Scored(reward=1, termination=Termination.AGENT_FAULT, detail="the harness was killed by signal 6")
    assert admit(fault, Facts(turn_cap_hit=True)) == fault.model_copy(update={"termination": Termination.MAX_TURNS})
    assert admit(fault, Facts(over_length=True)) == fault.model_copy(update={"termination": Termination.OVER_LENGTH})
    assert admit(fault, Facts()) == fault


def test_a_tampered_grader_outweighs_the_turn_cap() -> None:
    assert admit(scored(0, Termination.TAMPERED), Facts(turn_cap_hit=True)) == scored(0, Termination.TAMPERED)


def test_without_a_model_call_there_is_no_verdict_on_the_policy() -> None:
    assert admit(scored(1), Facts(policy_turns=0)).cause is Cause.HARNESS_NEVER_CALLED  # type: ignore[union-attr]
    timeout = Failed(stage=Stage.AGENT, cause=Cause.AGENT_TIMEOUT, detail="300 s", evidence=["killed"])
    never = admit(timeout, Facts(policy_turns=0))
    assert isinstance(never, Failed) and never.cause is Cause.HARNESS_NEVER_CALLED
    assert never.evidence == ["killed"] and "300 s" in never.detail
    setup = failed(Cause.SANDBOX_SETUP, Stage.SANDBOX_SETUP)
    assert admit(setup, Facts(policy_turns=0)) == setup


def test_every_combination_ends_as_the_table_says() -> None:
    outcomes: list[Scored | Failed] = [scored(reward, termination) for reward in (0, 1) for termination in Termination]
    outcomes += [failed(cause) for cause in Cause]
    for outcome, turns, capped, long in itertools.product(outcomes, (0, 1, 9), (False, True), (False, True)):
        final = admit(outcome, Facts(turns, capped, long))
        if turns == 0 and (isinstance(outcome, Scored) or outcome.cause is Cause.AGENT_TIMEOUT):
            assert isinstance(final, Failed) and final.cause is Cause.HARNESS_NEVER_CALLED
        elif isinstance(outcome, Scored) and outcome.termination is not Termination.TAMPERED and (capped or long):
            assert final == scored(outcome.reward, Termination.OVER_LENGTH if long else Termination.MAX_TURNS)
        else:
            assert final == outcome


@given(OUTCOMES, FACTS)
def test_engine_and_proxy_errors_are_never_a_reward(outcome: Scored | Failed, facts: Facts) -> None:
    final = admit(outcome, facts)
    if facts.engine_error or facts.proxy_error:
        assert isinstance(final, Failed) and final.cause is (Cause.ENGINE if facts.engine_error else Cause.PROXY)
    if isinstance(outcome, Failed):
        assert isinstance(final, Failed)
    if isinstance(final, Scored):
        assert isinstance(outcome, Scored) and final.reward == outcome.reward


@given(OUTCOMES, st.integers(1, 4))
def test_only_a_grader_that_could_not_run_is_played_again(outcome: Scored | Failed, attempts: int) -> None:
    if plays_again(outcome, attempts):
        assert isinstance(outcome, Failed) and outcome.cause in (Cause.VERIFIER, Cause.VERIFIER_TIMEOUT)
        assert attempts <= ADMISSION[outcome.cause].retries
