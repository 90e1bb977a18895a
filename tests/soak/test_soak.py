"""The soak in small: what `make soak` does with thousands of trials, with each kind of kill at least once."""

import asyncio

import pytest

from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from tests.sandbox.support import needs_sandbox

from .kills import Done, Kill
from .soak import Played, soak, unexplained, wrong_verdicts


@needs_sandbox
@pytest.mark.slow
def test_nothing_is_lost_left_or_judged_wrongly() -> None:
    report = asyncio.run(soak(trials=60, at_once=16, seed=1))
    assert report["problems"] == []
    kills = report["kills"]
    assert isinstance(kills, dict) and {"agent", "verifier", "runner"} <= kills.keys()


def scored(trial_id: str, reward: bool, diff: str, solves: bool = True, exit_code: int = 0) -> Played:
    outcome = Scored(reward=1 if reward else 0, termination=Termination.COMPLETED)
    return Played(trial_id, "t", solves, 0, 1, outcome, exit_code, diff)


def test_a_wrong_verdict_is_noticed() -> None:
    assert wrong_verdicts([scored("a", True, "fix"), scored("b", False, "[]", solves=False)]) == []
    assert wrong_verdicts([scored("a", True, "fix"), scored("b", False, "fix", exit_code=-9)])
    assert wrong_verdicts([scored("a", True, "[]", exit_code=-9)])
    assert wrong_verdicts([scored("a", False, "fix")])
    tampered = Scored(reward=0, termination=Termination.TAMPERED)
    assert wrong_verdicts([Played("a", "t", True, 0, 1, tampered, 0, "fix")])


def test_only_a_kill_during_a_trial_explains_its_failure() -> None:
    lost = Played("a", "t", True, 10, 20, Failed(stage=Stage.AGENT, cause=Cause.RUNNER_LOST))
    assert unexplained([lost], [Done(Kill.RUNNER, 1, 15)]) == []
    assert unexplained([lost], [Done(Kill.RUNNER, 1, 25)])
    assert unexplained([lost], [Done(Kill.AGENT, 1, 15)])
