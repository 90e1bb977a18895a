"""The scheduler of real runs on a virtual clock, which also finds every deadlock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainer.bench.schedule import clock
from trainer.rollout.schedule import EVALUATION, TRAINING, Prompt, Schedule
from trainer.rollout.slots import Slots

Trial = tuple[str, float]
"""Name and seconds."""


async def play(trial: Trial) -> str:
    await asyncio.sleep(trial[1])
    return trial[0]


def schedule(
    slots: int = 100, batch: int = 2, staleness: int = 1, parts: int = 1, run: Callable[[Trial], Awaitable[str]] = play
) -> Schedule[Trial, str]:
    return Schedule(run, Slots(slots), batch=batch, staleness=staleness, parts=parts)


def prompt(name: str, *seconds: float) -> tuple[str, list[Trial]]:
    return name, [(f"{name}{number}", length) for number, length in enumerate(seconds)]


def names(prompts: list[Prompt[Trial, str]]) -> list[str]:
    return [entry.name for entry in prompts]


def test_a_batch_is_the_finished_prompts_that_were_fed_first() -> None:
    async def course() -> None:
        made = schedule()
        assert made.wanted(batches=9) == 4
        made.feed([prompt("a", 9), prompt("b", 2, 5), prompt("c", 1), prompt("d", 3)])
        taken = await made.take()
        assert names(taken) == ["c", "d"] and asyncio.get_running_loop().time() == 3
        assert taken[0].results == {0: "c0"} and names(made.outstanding) == ["a", "b"]
        assert made.wanted(9) == 2 and made.wanted(1) == 0

    clock.run(course())


def test_what_no_step_may_train_any_more_is_cancelled_with_the_reason() -> None:
    reasons: list[str] = []

    async def watched(trial: Trial) -> str:
        try:
            return await play(trial)
        except asyncio.CancelledError as cancelled:
            reasons.append(f"{trial[0]} {cancelled}")
            raise

    async def course() -> None:
        made = schedule(run=watched)
        made.feed([prompt("slow", 1, 1000), prompt("a", 1), prompt("b", 1), prompt("c", 1)])
        assert names(await made.take()) == ["a", "b"] and made.take_late() == []
        made.version = 1
        made.feed([prompt("d", 5)])
        assert names(await made.take()) == ["c", "d"]
        (late,) = made.take_late()
        assert late.name == "slow" and late.results == {0: "slow0"} and late.begun == 0 and made.outstanding == []
        assert reasons == [f"slow1 {late.dropped}"]
        assert late.dropped == "stale: unfinished when the last batch was taken that may hold what began before version 1"

    clock.run(course())


def test_a_batch_in_parts_is_taken_as_its_prompts_finish() -> None:
    async def course() -> None:
        made = schedule(batch=4, parts=2)
        made.feed([prompt(name, seconds) for name, seconds in zip("abcdefgh", (9, 1, 2, 7, 3, 8, 8, 8), strict=True)])
        assert made.missing == 0
        assert names(await made.take()) == ["b", "c"] and asyncio.get_running_loop().time() == 2 and made.missing == 2
        assert names(await made.take()) == ["d", "e"] and asyncio.get_running_loop().time() == 7 and made.missing == 0
        assert made.take_late() == [] and names(made.outstanding) == ["a", "f", "g", "h"]

    clock.run(course())


def test_no_part_takes_the_place_of_a_prompt_that_may_finish_in_time() -> None:
    """Two prompts for which step 2 is the last keep two of its four places until the step can be full without them."""

    async def course(lengths: tuple[int, ...], *batches: list[str]) -> list[str]:
        made = schedule(batch=4, parts=4)
        made.feed([prompt(name, seconds) for name, seconds in zip("abcdef", (*lengths, 1, 1, 1, 1), strict=True)])
        assert names(await made.take()) == ["c", "d", "e", "f"]
        made.version = 1
        made.feed([prompt("g", 1), prompt("h", 1), prompt("i", 9), prompt("j", 9), prompt("k", 9), prompt("l", 9)])
        for batch in batches:
            assert names(await made.take()) == batch
        assert made.missing == 0
        return names(made.take_late())

    assert clock.run(course((5, 7), ["g", "h"], ["a"], ["b"])) == []
    assert clock.run(course((5, 700), ["g", "h"], ["a"], ["i"])) == ["b"]
    assert clock.run(course((700, 700), ["g", "h"], ["i", "j"])) == ["a", "b"]


def test_more_prompts_of_one_age_than_places_keep_all_of_these_and_the_rest_is_said_to_have_had_none() -> None:
    """With staleness 2 five prompts outlive two steps, one of which took a younger one; the third has four places."""

    async def course() -> None:
        made, loop = schedule(batch=4, staleness=2, parts=4), asyncio.get_running_loop()

        async def step(version: int, seconds: tuple[int, ...], fed: str) -> list[str]:
            made.version = version
            made.feed([prompt(name, length) for name, length in zip(fed, seconds, strict=True)])
            taken = names(await made.take())
            while made.missing:
                taken += names(await made.take())
            return sorted(taken)

        assert await step(0, (50, 50, 50, 50, 50, 8, 8, 8, 1, 1, 1, 1), "abcdefghijkl") == ["i", "j", "k", "l"]
        assert await step(1, (7, 19, 20, 21), "mnop") == ["f", "g", "h", "m"] and loop.time() == 8
        assert await step(2, (90, 90, 90, 90), "qrst") == ["a", "b", "c", "d"] and loop.time() == 50
        (late,) = made.take_late()
        assert late.dropped == "stale: without a place when the last batch was taken that may hold what began before version 1"
        assert late.results == {0: "e0"} and names(made.outstanding) == list("nopqrst")
        await made.close()

    clock.run(course())


def test_without_staleness_a_step_waits_for_its_whole_batch() -> None:
    async def course() -> None:
        made = schedule(staleness=0)
        assert made.wanted(9) == 2
        made.feed([prompt("a", 50, 1), prompt("b", 3)])
        assert names(await made.take()) == ["a", "b"]
        assert made.take_late() == [] and made.wanted(9) == 2

    clock.run(course())


def test_an_evaluation_gets_the_next_places_and_cannot_deadlock_with_training() -> None:
    """Every place is taken by training and more of it waits, as when the first evaluation of an asynchronous run once hung for ever."""

    async def course() -> None:
        made = schedule(slots=2)
        made.feed([prompt(name, 10, 10) for name in "abcd"])
        await asyncio.sleep(1)
        assert await made.evaluate([("e0", 4), ("e1", 4), ("e2", 4)]) == ["e0", "e1", "e2"]
        assert asyncio.get_running_loop().time() == 18
        assert names(await made.take()) == ["a", "b"] and asyncio.get_running_loop().time() == 28

    clock.run(course())


def test_a_standstill_is_found() -> None:
    async def course() -> None:
        await schedule().take()

    with pytest.raises(clock.Standstill):
        clock.run(course())


def test_the_first_error_ends_the_wait_as_it_is() -> None:
    async def refuse(trial: Trial) -> str:
        await asyncio.sleep(trial[1])
        raise PermissionError("refused")

    async def course() -> None:
        made = schedule(run=refuse)
        made.feed([prompt("a", 3, 1000)])
        with pytest.raises(PermissionError, match="refused"):
            await made.take()

    clock.run(course())


def test_rows_are_written_before_a_prompt_can_be_taken_and_not_for_a_dropped_one() -> None:
    stored: list[str] = []

    async def store(entry: Prompt[Trial, str]) -> None:
        await asyncio.sleep(5)
        stored.append(entry.name)

    async def course() -> None:
        made = Schedule(play, Slots(9), batch=1, staleness=1, finish=store)
        made.feed([prompt("a", 100), prompt("b", 1)])
        assert names(await made.take()) == ["b"] and asyncio.get_running_loop().time() == 6
        made.version = 1
        made.feed([prompt("c", 1)])
        assert names(await made.take()) == ["c"] and names(made.take_late()) == ["a"]
        assert stored == ["b", "c"]

    clock.run(course())


def test_ending_a_run_ends_its_rollouts() -> None:
    async def course() -> None:
        made = schedule(slots=1)
        made.feed([prompt("a", 1000), prompt("b", 1000)])
        await asyncio.sleep(1)
        await made.close()
        assert made.outstanding == [] and asyncio.get_running_loop().time() == 1

    clock.run(course())


@examples(60)
@given(st.integers(0, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(0, 10_000))
def test_no_trained_prompt_lags_more_than_allowed_and_none_is_lost(
    staleness: int, batch: int, parts: int, size: int, places: int, seed: int
) -> None:
    """Whatever the lengths: every step gets its batch, every prompt is trained or dropped once and with its reason, and up to staleness 1
    only unfinished ones are dropped."""
    draws = random.Random(seed)
    steps = 6

    async def course() -> None:
        made = schedule(places, batch, staleness, parts)
        fed, seen = 0, list[str]()
        for step in range(1, steps + 1):
            count = made.wanted(steps - step + 1)
            made.feed([prompt(f"{fed + i}.", *(draws.paretovariate(0.7) for _ in range(size))) for i in range(count)])
            fed += count
            taken = await made.take()
            while made.missing:
                await asyncio.sleep(draws.random() * 3)
                taken += await made.take()
            assert len(taken) == batch and all(len(entry.results) == size for entry in taken)
            assert all(0 <= step - 1 - (entry.begun or 0) <= staleness for entry in taken)
            late = made.take_late()
            assert all(entry.dropped.startswith("stale: unfinished") == (len(entry.results) < size) for entry in late)
            assert staleness > 1 or all(len(entry.results) < size for entry in late)
            seen += names(taken) + names(late)
            await asyncio.sleep(draws.random() * 3)
            made.version = step
        assert len(set(seen)) == len(seen) and len(seen) + len(made.outstanding) == fed
        assert staleness or len(seen) == fed
        await made.close()

    clock.run(course())


def test_places_go_by_rank_and_then_in_order_of_arrival() -> None:
    order: list[str] = []

    async def course() -> None:
        slots = Slots(1)

        async def visit(name: str, rank: int) -> None:
            async with slots.place(rank):
                order.append(name)
                await asyncio.sleep(1)

        visits = [visit("first", TRAINING), visit("t1", TRAINING), visit("t2", TRAINING), visit("e", EVALUATION)]
        tasks = [asyncio.create_task(one) for one in visits]
        await asyncio.sleep(0.5)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["first", "e", "t2"]
        await asyncio.sleep(1)
        assert slots.busy_share() == pytest.approx(3 / 4)
        async with slots.place():
            assert slots.busy_share() != slots.busy_share()  # no time has passed

    clock.run(course())


def test_a_place_handed_to_a_cancelled_caller_is_passed_on() -> None:
    async def course() -> None:
        slots = Slots(1)

        async def hold(seconds: float) -> None:
            async with slots.place():
                await asyncio.sleep(seconds)

        first, second, third = (asyncio.create_task(hold(seconds)) for seconds in (1, 1, 1))
        await asyncio.sleep(0)
        first.add_done_callback(lambda _: second.cancel())  # in the very moment in which it gets the place
        await asyncio.wait_for(third, 10)
        assert second.cancelled()

    clock.run(course())
