from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.learning.advantages import DELTA, NoSignal, group_advantages

rewards = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=16)


def test_advantages_are_those_of_torch_std() -> None:
    group = group_advantages([1, 0, 0, 1, 1])
    values = torch.tensor([1.0, 0, 0, 1, 1], dtype=torch.float64)
    assert group.advantages == pytest.approx(((values - values.mean()) / (values.std() + DELTA)).numpy())
    assert group.weights.tolist() == [0.2] * 5
    assert group.no_signal is None


@given(rewards)
def test_failed_members_change_nothing_for_the_others(members: list[float | None]) -> None:
    group = group_advantages(members)
    scored = [index for index, reward in enumerate(members) if reward is not None]
    alone = group_advantages([members[index] for index in scored] or [None])
    assert group.advantages[scored].tolist() == alone.advantages[: len(scored)].tolist()
    assert (group.mean, group.std, group.no_signal) == (alone.mean, alone.std, alone.no_signal)
    failed = [index for index, reward in enumerate(members) if reward is None]
    assert not group.advantages[failed].any() and not group.weights[failed].any()


@given(rewards)
def test_weights_count_failed_members_under_group_and_not_under_valid(members: list[float | None]) -> None:
    scored = sum(reward is not None for reward in members)
    assert group_advantages(members, "group").weights.sum() == pytest.approx(scored / len(members))
    assert group_advantages(members, "valid").weights.sum() == pytest.approx(1 if scored else 0)


@given(rewards)
def test_advantages_sum_to_zero_and_vanish_exactly_without_signal(members: list[float | None]) -> None:
    group = group_advantages(members)
    assert group.advantages.sum() == pytest.approx(0, abs=1e-9)
    assert (group.no_signal is not None) == (not group.advantages.any())


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([None, None], NoSignal.TOO_FEW_SCORED),
        ([1, None, None], NoSignal.TOO_FEW_SCORED),
        ([1, 1, None], NoSignal.ZERO_VARIANCE),
        ([0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2], NoSignal.ZERO_VARIANCE),
    ],
)
def test_groups_without_signal_say_why(members: list[float | None], reason: NoSignal) -> None:
    group = group_advantages(members)
    assert group.no_signal is reason
    assert not np.any(group.advantages)


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        group_advantages([])
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1, float("nan")])
