from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from server.schemas.runspec import Harness
from server.schemas.states import Phase
from server.schemas.trials import Identifier
from trainer.rollout.groups import LONGEST_TASK, Group, Plan, draw_harness, evaluation_sizes, make_groups, trial_seed

ONE = [Harness(name="a", version="1")]
TWO = [Harness(name="a", version="1", weight=1), Harness(name="b", version="1", weight=3)]
TASK = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fullmatch=True)


def one(*arguments: Any) -> Group:
    (group,) = make_groups(*arguments)
    return group


def test_ids_are_readable() -> None:
    assert one(Plan(ONE, 0), Phase.TRAIN, 7, "arith-12", 8).trial_id(3) == "s007-arith-12-3"
    assert one(Plan(ONE, 0), Phase.EVAL, 0, "arith-12", 1).trial_id(0) == "e000-arith-12-0"
    assert one(Plan(ONE, 0), Phase.TRAIN, 7, "arith-12", 8).trial_id(3, attempt=2) == "s007-arith-12-3.2"
    assert one(Plan(ONE, 0, attempt=2), Phase.TRAIN, 7, "arith-12", 8).trial_id(3) == "s007r2-arith-12-3"


@given(TASK, st.sampled_from(Phase), st.integers(0, 999_999), st.integers(0, 999))
def test_ids_are_identifiers_whatever_the_task_is_called(task: str, phase: Phase, step: int, sample: int) -> None:
    TypeAdapter(Identifier).validate_python(one(Plan(ONE, 0, attempt=12), phase, step, task, 1000).trial_id(sample, attempt=2))


def test_long_tasks_that_begin_alike_keep_apart() -> None:
    stem = "x" * LONGEST_TASK
    groups = {one(Plan(ONE, 0), Phase.TRAIN, 1, stem + end, 8).group_id for end in ("1", "2", "")}
    assert len(groups) == 3


def test_harnesses_are_drawn_by_weight_and_the_same_every_time() -> None:
    drawn = [draw_harness(TWO, f"5/{step}/t{task}").name for step in range(40) for task in range(50)]
    assert drawn == [draw_harness(TWO, f"5/{step}/t{task}").name for step in range(40) for task in range(50)]
    assert 0.72 < Counter(drawn)["b"] / len(drawn) < 0.78


def test_evaluations_of_a_run_use_the_same_harness_for_a_task() -> None:
    for task in map(str, range(30)):
        assert len({one(Plan(TWO, 0), Phase.EVAL, step, task, 1).harness for step in range(5)}) == 1


def test_a_pinned_evaluation_and_a_task_with_a_harness_of_its_own_draw_nothing() -> None:
    plan = Plan(TWO, 0, by="trajectory", evaluated_in="a", fixed={"own": "b"})
    assert {one(plan, Phase.EVAL, 0, str(task), 3).harness for task in range(30)} == {"a"}
    assert {one(plan, Phase.TRAIN, step, "own", 3).harness for step in range(30)} == {"b"}
    assert one(plan, Phase.EVAL, 0, "own", 3).harness == "a"


@given(TASK, st.integers(0, 999_999), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_trajectories_that_draw_for_themselves_make_one_group_for_each_harness(task: str, step: int, size: int, seed: int) -> None:
    groups = make_groups(Plan(TWO, seed, attempt=12, by="trajectory"), Phase.TRAIN, step, task, size, "uid")
    assert [sample for group in groups for sample in group.samples] == list(range(size))
    assert len({group.harness for group in groups}) == len({group.group_id for group in groups}) == len(groups) <= 2
    for group in groups:
        TypeAdapter(Identifier).validate_python(group.trial_id(999, attempt=2))
    assert groups == make_groups(Plan(TWO, seed, attempt=12, by="trajectory"), Phase.TRAIN, step, task, size, "uid")


@given(st.integers(1, 60), st.integers(1, 200))
def test_an_evaluation_has_exactly_its_rollouts_spread_evenly(tasks: int, rollouts: int) -> None:
    sizes = evaluation_sizes([str(i) for i in range(tasks)], rollouts)
    counts = [count for _, count in sizes]
    assert sum(counts) == rollouts
    assert max(counts) - min(counts) <= 1
    assert len({task for task, _ in sizes}) == len(sizes) == min(tasks, rollouts)


def test_trial_seeds_differ() -> None:
    assert len({trial_seed(0, f"s001-t-{i}") for i in range(64)} | {trial_seed(1, "s001-t-0")}) == 65
