from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schemas.runspec import Relative
from tests.support.examples import examples
from trainer.rollout.pool import TaskPool

SIZE = 8
TASKS = [f"t-{i}" for i in range(60)]


def pool(tasks: list[str] = TASKS, seed: int = 0, **rule: float) -> TaskPool:
    return TaskPool(tasks, Relative.model_validate(rule), SIZE, seed)


def test_the_chance_of_a_signal_is_the_integral_over_what_is_not_known() -> None:
    """Against the mean over a fine grid of solve rates, weighed by the posterior."""
    known = pool(["t"])
    known.note([("t", 6, 8)])
    grid = [(i + 0.5) / 20_000 for i in range(20_000)]
    weights = [p**6 * (1 - p) ** 2 for p in grid]
    signal = sum(w * (1 - p**SIZE - (1 - p) ** SIZE) for w, p in zip(weights, grid, strict=True)) / sum(weights)
    assert known.chance("t") == pytest.approx(signal, abs=1e-6)


def test_an_unknown_task_is_likelier_than_one_that_is_always_solved_or_never() -> None:
    known = pool(["new", "solved", "hopeless", "half"])
    known.note([("solved", 8, 8), ("hopeless", 0, 8), ("half", 4, 8)])
    assert known.chance("half") > known.chance("new") > known.chance("solved")
    assert known.chance("solved") == pytest.approx(known.chance("hopeless"))


def test_solved_tasks_are_retired_and_looked_at_again() -> None:
    known = pool(["a", "b"], revisit_steps=5)
    assert set(known.choose(2, step=1)) == {"a", "b"}
    known.note([("a", 8, 8), ("b", 4, 8)])
    known.note([("a", 8, 8), ("b", 4, 8)])
    assert known.metrics(2, known.note([]))["lego/pool/retired"] == 1
    assert [known.choose(1, step) for step in range(2, 6)] == [["b"]] * 4
    assert {task for step in range(6, 40) for task in known.choose(1, step)} == {"a", "b"}


def test_a_batch_is_filled_with_retired_tasks_before_one_comes_twice() -> None:
    known = pool(["a", "b", "c"])
    known.choose(3, 1)
    for _ in range(3):
        known.note([("a", 8, 8), ("b", 0, 8)])
    assert known.choose(3, 2)[0] == "c" and set(known.choose(3, 2)) == {"a", "b", "c"}
    assert sorted(known.choose(6, 2)) == ["a", "a", "b", "b", "c", "c"]


def test_what_is_being_played_is_not_drawn_again() -> None:
    assert "a" not in pool(["a", "b", "c"]).choose(2, 1, busy=["a"])
    assert pool(["a"]).choose(1, 1, busy=["a"]) == ["a"], "unless there is nothing else"


def test_failures_alone_say_nothing() -> None:
    known = pool(["a"])
    before = known.chance("a")
    assert known.note([("a", 0, 0)]).groups == 0 and known.chance("a") == before and known.memory == {}


@examples(30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_draws_follow_from_the_seed_and_go_on_behind_a_checkpoint(seed: int, cut: int) -> None:
    def play(known: TaskPool, steps: range) -> list[list[str]]:
        drawn = []
        for step in steps:
            tasks = known.choose(4, step)
            known.note([(task, int(task[2:]) % (SIZE + 1), SIZE) for task in tasks])
            drawn.append(tasks)
        return drawn

    whole, first, second = pool(seed=seed), pool(seed=seed), pool(seed=seed)
    everything = play(whole, range(1, 31))
    begun = play(first, range(1, cut + 1))
    second.remember(first.memory, first.draws)
    assert begun + play(second, range(cut + 1, 31)) == everything


def lose(rates: dict[str, float], seed: int) -> tuple[float, float, float]:
    """Shares of groups without signal, over the last 40 of 60 steps: what was lost, what the pool says that a static one would have lost,
    and what it would have."""
    rng, known = random.Random(seed), pool(list(rates), seed)
    lost, said = [], []
    for step in range(1, 61):
        tasks = known.choose(8, step)
        seen = known.note([(task, sum(rng.random() < rates[task] for _ in range(SIZE)), SIZE) for task in tasks])
        found = known.metrics(step, seen)
        assert found["lego/pool/saved"] == found["lego/pool/static_zero_variance"] - found["lego/pool/zero_variance"]
        lost.append(found["lego/pool/zero_variance"])
        said.append(found["lego/pool/static_zero_variance"])
    static = sum(rate**SIZE + (1 - rate) ** SIZE for rate in rates.values()) / len(rates)
    return sum(lost[20:]) / 40, sum(said[20:]) / 40, static


@pytest.mark.parametrize("seed", range(3))
def test_the_share_without_signal_falls_against_a_static_pool(seed: int) -> None:
    """Half of the tasks are solved always, a quarter never: a static pool loses 77 % of its groups to them and to chance."""
    lost, said, static = lose(
        {task: rate for task, (_, rate) in zip(TASKS, product(range(8), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.3, 0.6]), strict=False)}, seed
    )
    assert lost < static / 2
    assert lost + 0.2 < said < static, "what is said to be saved is there"


@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_can_be_saved_nothing_is_said_to_be(seed: int) -> None:
    """All tasks have one solve rate. Those with a group without signal by chance are retired, and keep it for a while."""
    lost, said, static = lose(dict.fromkeys(TASKS, 0.92), seed)
    assert lost == pytest.approx(static, abs=0.06) and said == pytest.approx(static, abs=0.06)
