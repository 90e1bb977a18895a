from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schemas.capture import BranchClass, BranchReason, Exclusion
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.runspec import Algorithm
from server.schemas.states import Phase
from trainer.capture.sample import Sample
from trainer.rollout.groups import Group
from trainer.rollout.manager import PlayedGroup
from trainer.rollout.trial import Rollout
from trainer.verl_plugin.update import StepUpdate, harness_metrics, lag_metrics, plan_update, row_owners


def sample(trained: int, excluded: Exclusion | None = None) -> Sample:
    n = trained + 2
    mask = np.arange(n) >= 2
    return Sample(
        tokens=np.zeros(n, np.int32),
        mask=mask,
        log_probs=np.zeros(n, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        routes=None,
        routed=np.zeros(n, bool),
        prompt_len=2,
        reason=BranchReason.ROOT,
        branch_class=BranchClass.POLICY,
        excluded=excluded,
    )


def rollout(number: int, reward: int | None, branches: Sequence[Sample]) -> Rollout:
    sampled = sum(int(branch.mask.sum()) for branch in branches)
    if reward is None:
        return Rollout(f"t-{number}", number, Failed(stage=Stage.AGENT, cause=Cause.AGENT_TIMEOUT), [], sampled, 1)
    outcome = Scored(reward=1 if reward else 0, termination=Termination.COMPLETED)
    return Rollout(f"t-{number}", number, outcome, list(branches), sampled, 1)


def group(uid: str, rewards: Sequence[int | None], branches: Sequence[Sequence[int]]) -> PlayedGroup:
    members = [rollout(i, reward, [sample(n) for n in counts]) for i, (reward, counts) in enumerate(zip(rewards, branches, strict=True))]
    return PlayedGroup(Group(f"s001-{uid}", 1, Phase.TRAIN, uid, "h", len(members), uid), members)


def plan(groups: Sequence[PlayedGroup], epochs: int = 1, minibatches: int = 1, seed: int = 0) -> StepUpdate:
    return plan_update(groups, Algorithm(epochs=epochs, minibatches=minibatches), seed)


def test_weights_are_the_objectives_for_a_worked_example() -> None:
    """Two groups; the first has rewards 1, 0, failed, 0 with a two-branch winner, the second has no signal."""
    update = plan([group("a", [1, 0, None, 0], [[30, 10], [20], [5], [20]]), group("b", [1, 1, 1, 1], [[8]] * 4)])
    rewards = np.array([1.0, 0.0, 0.0])
    advantage = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    weights = {row.key: row.weight for row in update.rows}
    share = 1 / 4 / 2  # 1/G over 1/P
    assert weights == pytest.approx(
        {
            "a_0_0": advantage[0] * share * 30 / 40,
            "a_0_1": advantage[0] * share * 10 / 40,
            "a_1_0": advantage[1] * share,
            "a_3_0": advantage[2] * share,
        }
    )
    assert update.account.sampled == 80 + 32 and update.account.trained == 80
    assert update.account.excluded == {Exclusion.ZERO_ADVANTAGE: 32}
    assert update.metrics["lego/failed/agent_timeout"] == 1 and update.metrics["lego/no_signal/zero_variance"] == 1
    assert update.metrics["lego/reward/mean"] == pytest.approx(5 / 7)


def test_a_step_without_signal_has_no_rows() -> None:
    update = plan([group("a", [0, 0], [[3], [4]]), group("b", [None, 1], [[5], [6]])])
    assert update.rows == [] and update.account.trained == 0
    assert update.account.excluded == {Exclusion.ZERO_ADVANTAGE: 13}


def test_a_step_in_which_everything_failed_has_no_rows() -> None:
    update = plan([group("a", [None, None], [[3], [4]])])
    assert update.rows == [] and update.account.sampled == 0 and "lego/reward/mean" not in update.metrics


def test_excluded_branches_are_listed_and_not_trained() -> None:
    played = group("a", [1, 0], [[10], [10]])
    played.rollouts[0].samples.append(sample(4, Exclusion.OVER_BUDGET))
    played.rollouts[0] = rollout(0, 1, played.rollouts[0].samples)
    update = plan([played])
    assert [row.key for row in update.rows] == ["a_0_0", "a_1_0"]
    assert update.account.excluded == {Exclusion.OVER_BUDGET: 4}


def test_a_step_of_excluded_branches_leaves_no_row() -> None:
    lost = [rollout(i, reward, [sample(4, Exclusion.UNDELIVERED)]) for i, reward in enumerate((0, 1))]
    played = [PlayedGroup(Group("s001-a", 1, Phase.TRAIN, "a", "h", 2, "a"), lost)]
    update = plan([played[0]])
    assert update.rows == [] and update.account.excluded == {Exclusion.UNDELIVERED: 8}


GROUPS = st.lists(
    st.lists(st.tuples(st.sampled_from([0, 1, None]), st.lists(st.integers(1, 40), min_size=1, max_size=3)), min_size=2, max_size=5),
    min_size=1,
    max_size=5,
)


@given(GROUPS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_every_token_is_trained_once_per_epoch_or_listed(
    groups: list[list[tuple[int | None, list[int]]]], epochs: int, minibatches: int, seed: int
) -> None:
    played = [group(str(i), [reward for reward, _ in members], [counts for _, counts in members]) for i, members in enumerate(groups)]
    update = plan(played, epochs, minibatches, seed)
    keys = [row.key for row in update.rows]
    assert len(set(keys)) == len(keys)
    assert update.account.trained == sum(row.tokens for row in update.rows)
    places: dict[int, set[tuple[int, ...]]] = {}
    for row in update.rows:
        assert len(row.minibatches) == epochs and all(0 <= number < minibatches for number in row.minibatches)
        places.setdefault(row.rollout, set()).add(row.minibatches)
    assert all(len(place) == 1 for place in places.values())  # branches of a rollout stay together
    for number in places:
        assert sum(row.share for row in update.rows if row.rollout == number) == pytest.approx(1)
    if len(places) >= minibatches:
        for epoch in range(epochs):
            assert {row.minibatches[epoch] for row in update.rows} == set(range(minibatches))


def test_lag_counts_tokens_and_each_rollouts_oldest_one() -> None:
    """Weights of version 5: one rollout of version 5, and one that an update interrupted after 3 of 10 tokens."""
    fresh, across = sample(4), sample(10)
    fresh.versions[fresh.mask] = 5
    across.versions[across.mask] = [4] * 3 + [5] * 7
    played = PlayedGroup(group("a", [1, 0], [[1], [1]]).group, [rollout(0, 1, [fresh]), rollout(1, 0, [across])])
    assert lag_metrics([played], 5) == {
        "lego/lag/tokens/0": 11,
        "lego/lag/tokens/1": 3,
        "lego/lag/mean": 0.5,
        "lego/lag/max": 1,
        "lego/lag/rollouts_across": 1,
    }


def test_tokens_of_stale_groups_are_listed() -> None:
    """A group that was dropped with one rollout still under way, one failed and two scored."""
    dropped = group("b", [1, 0, None], [[7], [5, 3], [2]])
    dropped = PlayedGroup(replace(dropped.group, size=4), dropped.rollouts)
    update = plan_update([group("a", [1, 0], [[10], [10]])], Algorithm(), 0, stale=[dropped])
    assert update.account.excluded == {Exclusion.STALE: 15} and update.account.sampled == 35
    assert {name: n for name, n in update.metrics.items() if "stale" in name} == {
        "lego/excluded_tokens/stale": 15,
        "lego/stale/groups": 1,
        "lego/stale/rollouts": 2,
        "lego/stale/rollouts_cut": 1,
    }


def test_with_a_kl_term_rollouts_without_signal_have_rows_of_weight_zero() -> None:
    groups = [group("a", [1, 0], [[3], [4]]), group("b", [1, 1, None], [[5], [6], [7]])]
    update = plan_update(groups, Algorithm(kl=1e-3), 0)
    assert [(row.key, row.weight == 0) for row in update.rows] == [("a_0_0", False), ("a_1_0", False), ("b_0_0", True), ("b_1_0", True)]
    assert [row.factor for row in update.rows] == pytest.approx([1 / 4, 1 / 4, 1 / 6, 1 / 6])
    assert update.account.trained == 7 and update.account.excluded == {Exclusion.ZERO_ADVANTAGE: 11}


def test_ppo_weighs_every_token_of_the_step_the_same() -> None:
    groups = [group("a", [1, 0, None], [[30, 10], [20], [9]]), group("b", [1, 1], [[8], [32]])]
    for normaliser in ("group", "valid"):
        update = plan_update(groups, Algorithm(loss="ppo", normaliser=normaliser), 0)
        assert [row.factor for row in update.rows] == pytest.approx([30 / 100, 10 / 100, 20 / 100])


def test_coverage_of_routes_shows_where_a_sequence_lost_them() -> None:
    """A long branch whose last quarter has no routes (a buffer that was too small) beside a short one that has all of them."""
    whole, cut = np.ones(41, bool), np.arange(401) < 300
    whole[-1] = cut[-1] = False  # the last token is never an input
    branches = [replace(sample(len(routed) - 2), routes=np.zeros((len(routed), 1, 2), np.uint8), routed=routed) for routed in (whole, cut)]
    metrics = plan([PlayedGroup(group("a", [1], [[1]]).group, [rollout(0, 1, branches)])]).metrics
    assert metrics["lego/routing/missing"] == 100
    assert metrics["lego/routing/coverage"] == pytest.approx(340 / 440)
    assert metrics["lego/routing/coverage/decile_1"] == metrics["lego/routing/coverage/decile_7"] == 1
    assert metrics["lego/routing/coverage/decile_8"] == pytest.approx((4 + 20) / 44)
    assert metrics["lego/routing/coverage/decile_10"] == pytest.approx(4 / 44)


def test_a_mixed_step_is_split_by_harness_and_an_unmixed_one_is_not() -> None:
    ours, other = group("a", [1, 0, None], [[3], [3], [3]]), group("a", [1, 1], [[2], [2]])
    # Two groups of one prompt: the second one's samples are numbered on from the first.
    members = [replace(member, sample=member.sample + 3) for member in other.rollouts]
    other = PlayedGroup(replace(other.group, harness="b", first=3), members)
    assert harness_metrics([ours]) == {}
    assert harness_metrics([ours, other]) == {
        "lego/harness/h/groups": 1,
        "lego/harness/h/trials": 3,
        "lego/harness/h/failed": 1,
        "lego/harness/h/outcome/completed": 2,
        "lego/harness/h/outcome/agent_timeout": 1,
        "lego/harness/h/turns/mean": 1,
        "lego/harness/h/reward/mean": 0.5,
        "lego/harness/b/groups": 1,
        "lego/harness/b/trials": 2,
        "lego/harness/b/failed": 0,
        "lego/harness/b/outcome/completed": 2,
        "lego/harness/b/turns/mean": 1,
        "lego/harness/b/reward/mean": 1,
    }
    owners = row_owners(["a_0_0", "a_1_0", "a_3_0", "a_4_0"], [ours, other])
    assert (owners.harnesses, owners.rollouts) == (["h", "h", "b", "b"], [0, 1, 3, 4])
    assert len(owners.versions) == 3 + 3 + 2 + 2
