import math

from plugin.demo import significant, summarise, verdict
from server.schemas.api import Point, RunStatus, StepRow, TrialRow
from server.schemas.outcome import Stage
from server.schemas.states import Phase, RunState, TrialState

CREATED = 1000.0


def status(held_out: list[Point], state: RunState = RunState.SUCCEEDED, problem: str = "") -> RunStatus:
    return RunStatus(
        run_id="r1",
        name="",
        state=state,
        reason="",
        created=CREATED,
        started=CREATED,
        finished=None,
        steps_done=2,
        steps_expected=2,
        trials=4,
        failed=1,
        summary="",
        forming=None,
        train_reward=[],
        held_out=held_out,
        outcomes={},
        last_metrics={},
        last_event=None,
        problem=problem,
    )


def step(number: int, pearson: float) -> StepRow:
    metrics = {
        "training/rollout_actor_probs_pearson_corr": pearson,
        "lego/sampled_tokens": 100.0,
        "lego/trained_tokens": 60.0,
        "lego/excluded_tokens/zero_advantage": 40.0,
    }
    return StepRow(step=number, time=0, metrics=metrics)


def trial(name: str, phase: Phase, started: float, finished: float) -> TrialRow:
    return TrialRow(
        trial_id=name,
        group_id=None,
        step=0,
        phase=phase,
        task="t",
        harness="h",
        sample=0,
        state=TrialState.SCORED,
        stage=Stage.DONE,
        outcome=None,
        turns=None,
        sampled_tokens=None,
        started=started,
        finished=finished,
    )


RISE = [Point(step=0, value=26 / 96, n=96), Point(step=2, value=50 / 96, n=96)]


def test_the_summary_adds_up_the_run() -> None:
    trials = [
        trial("a", Phase.EVAL, CREATED + 8, CREATED + 9),
        trial("b", Phase.TRAIN, CREATED + 10, CREATED + 99),
        trial("c", Phase.EVAL, CREATED + 20, CREATED + 31.5),
    ]
    result = summarise(status(RISE), [step(1, 0.9995), step(2, 0.9991), step(3, math.nan)], trials)
    assert list(result) == [
        "run",
        "steps",
        "solve_rate_first",
        "solve_rate_last",
        "p_value",
        "trials",
        "failed",
        "sampled_tokens",
        "trained_tokens",
        "zero_advantage_tokens",
        "pearson",
        "startup_s",
        "wall_s",
    ]
    assert (result["sampled_tokens"], result["trained_tokens"], result["zero_advantage_tokens"]) == (300, 180, 120)
    assert (result["pearson"], result["startup_s"], result["wall_s"]) == (0.9991, 8.0, 31.5)
    assert (result["solve_rate_first"], result["solve_rate_last"]) == (0.2708, 0.5208)
    assert significant(result)
    assert "a significant rise" in verdict(status(RISE), result)


def test_a_small_rise_is_no_rise() -> None:
    flat = status([Point(step=0, value=0.25, n=96), Point(step=2, value=0.26, n=96)])
    result = summarise(flat, [], [])
    assert not significant(result)
    assert "no rise" in verdict(flat, result)


def test_a_run_that_broke_off_has_no_verdict_but_a_problem() -> None:
    failed = status(RISE[:1], RunState.FAILED, "the trainer ended with code 1: see logs")
    result = summarise(failed, [], [])
    assert result["p_value"] is None
    assert not significant(result)
    assert verdict(failed, result) == "The run failed: the trainer ended with code 1: see logs"
