import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from server.schemas.outcome import ADMISSION, OUTCOME, Cause, Failed, Fault, Scored, Stage, Termination, admission


def test_every_kind_of_outcome_has_an_admission_row() -> None:
    assert set(ADMISSION) == set(Termination) | set(Cause)


def test_failed_has_no_reward_to_average() -> None:
    failed = Failed(stage=Stage.VERIFIER, cause=Cause.VERIFIER)
    assert not hasattr(failed, "reward")
    with pytest.raises(ValidationError, match="reward"):
        OUTCOME.validate_python({"kind": "failed", "stage": "verifier", "cause": "verifier", "reward": 0})


@given(st.sampled_from(list(Cause)))
def test_no_failed_trial_is_trained(cause: Cause) -> None:
    row = admission(Failed(stage=Stage.AGENT, cause=cause))
    assert not row.trained and row.fault is not Fault.POLICY


@given(st.sampled_from(list(Termination)), st.sampled_from([0, 1]))
def test_scored_trials_are_trained_once_and_survive_the_wire(termination: Termination, reward: int) -> None:
    scored = Scored(reward=reward, termination=termination)  # type: ignore[arg-type]
    assert admission(scored) == (True, 0, Fault.POLICY)
    assert OUTCOME.validate_json(scored.model_dump_json()) == scored


@pytest.mark.parametrize("reward", [0.5, 2, -1, None])
def test_a_reward_is_zero_or_one(reward: object) -> None:
    with pytest.raises(ValidationError):
        OUTCOME.validate_python({"kind": "scored", "reward": reward, "termination": "completed"})
