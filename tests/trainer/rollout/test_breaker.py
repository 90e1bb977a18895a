"""The stop rule within a step, with the scheduler of real runs on a virtual clock. Its whole way: tests/trainer/test_main_ppo.py."""

from __future__ import annotations

import asyncio

import pytest

from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.states import Phase
from trainer.bench.schedule import clock
from trainer.rollout.breaker import Breaker, TooManyFailures
from trainer.rollout.groups import Group
from trainer.rollout.schedule import Schedule
from trainer.rollout.slots import Slots

BROKEN = Failed(stage=Stage.SANDBOX_SETUP, cause=Cause.SANDBOX_SETUP, detail="mount:\n  no space left on device")
FINE = Scored(reward=0, termination=Termination.COMPLETED)


def group(step: int = 1, phase: Phase = Phase.TRAIN) -> Group:
    return Group(f"{phase}-{step}", step, phase, "task", "harness", 4)


def test_as_many_failures_as_allowed_are_no_reason_to_stop() -> None:
    breaker = Breaker(0.5, step_size=4, evaluation_size=2)
    for outcome in (BROKEN, FINE, BROKEN, FINE):
        breaker.note(group(), "t", outcome)
    breaker.note(group(2), "t", BROKEN)
    breaker.note(group(1, Phase.EVAL), "t", BROKEN)
    everything = Breaker(1.0, step_size=4, evaluation_size=2)
    for _ in range(4):
        everything.note(group(), "t", BROKEN)
    everything.check()


def test_one_more_stops_the_run_and_says_why() -> None:
    breaker = Breaker(0.5, step_size=4, evaluation_size=2)
    breaker.note(group(), "s001-0", BROKEN)
    breaker.note(group(), "s001-1", Failed(stage=Stage.IMAGE, cause=Cause.IMAGE))
    with pytest.raises(TooManyFailures) as stopped:
        breaker.note(group(), "s001-2", BROKEN)
    assert str(stopped.value) == (
        "3 of 4 trials of step 1 failed (sandbox_setup 2, image 1), more than monitors.failed_share = 0.5 allows;"
        " the others were not begun. s001-2: mount: no space left on device. Mend the cause and start a new run"
    )
    with pytest.raises(TooManyFailures, match="3 of 4 trials of step 1"):
        breaker.note(group(2), "s002-0", FINE)
    breaker = Breaker(0.5, step_size=4, evaluation_size=1)
    with pytest.raises(TooManyFailures, match="1 of 1 trials of the evaluation after step 3"):
        breaker.note(group(3, Phase.EVAL), "e003-0", BROKEN)


@pytest.mark.parametrize("places", [1, 3, 100])
def test_no_trial_begins_once_the_step_is_lost(places: int) -> None:
    """Of 16, with half allowed to fail, the ninth failure is the last that anything was begun for."""
    breaker = Breaker(0.5, step_size=16, evaluation_size=1)
    begun = ended = 0

    async def play(_: int) -> None:
        nonlocal begun, ended
        breaker.check()
        begun += 1
        await asyncio.sleep(1 + begun / 100)
        ended += 1
        breaker.note(group(), "t", BROKEN)

    async def course() -> None:
        schedule = Schedule(play, Slots(places), batch=4, staleness=0)
        schedule.feed((f"p{number}", range(4)) for number in range(4))
        with pytest.raises(TooManyFailures):
            await schedule.take()
        await schedule.close()

    clock.run(course())
    assert ended == 9 and begun == min(16, 9 + places - 1)
