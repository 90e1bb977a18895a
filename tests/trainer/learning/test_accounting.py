from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schemas.capture import BranchClass, BranchReason, Exclusion
from trainer.capture.sample import Sample
from trainer.learning.accounting import AccountingError, TokenAccount, rollout_account, step_account


def make_sample(sampled: int, excluded: Exclusion | None = None) -> Sample:
    mask = np.array([False, *[True] * sampled, False])
    zeros = np.zeros(len(mask))
    return Sample(
        tokens=zeros.astype(np.int32),
        mask=mask,
        log_probs=zeros.astype(np.float32),
        versions=zeros.astype(np.int32),
        routes=None,
        routed=np.zeros(len(mask), dtype=bool),
        prompt_len=1,
        reason=BranchReason.ROOT,
        branch_class=BranchClass.POLICY,
        excluded=excluded,
    )


branches = st.lists(st.tuples(st.integers(0, 50), st.none() | st.sampled_from(Exclusion)), max_size=5)


@given(st.lists(st.tuples(branches, st.booleans()), max_size=6))
def test_a_step_adds_up(rollouts: list[tuple[list[tuple[int, Exclusion | None]], bool]]) -> None:
    accounts = [
        rollout_account(sum(n for n, _ in parts), [make_sample(n, reason) for n, reason in parts], None if signal else Exclusion.STALE)
        for parts, signal in rollouts
    ]
    step = step_account(accounts)
    assert step.sampled == sum(n for parts, _ in rollouts for n, _ in parts)
    assert step.trained == sum(n for parts, signal in rollouts if signal for n, reason in parts if reason is None)
    assert step.sampled == step.trained + sum(step.excluded.values())


def test_reasons_are_kept_apart_and_no_signal_is_one_of_them() -> None:
    samples = [make_sample(5), make_sample(3, Exclusion.AUXILIARY), make_sample(2, Exclusion.OVER_BUDGET)]
    assert rollout_account(10, samples).excluded == {Exclusion.AUXILIARY: 3, Exclusion.OVER_BUDGET: 2}
    assert rollout_account(10, samples, Exclusion.ZERO_ADVANTAGE).excluded == {
        Exclusion.AUXILIARY: 3,
        Exclusion.OVER_BUDGET: 2,
        Exclusion.ZERO_ADVANTAGE: 5,
    }


def test_lost_and_doubled_tokens_are_found() -> None:
    with pytest.raises(AccountingError, match=r"7 tokens were sampled but 5 .* 2 are unaccounted for"):
        rollout_account(7, [make_sample(5)])
    with pytest.raises(AccountingError, match=r"-1 are unaccounted for"):
        rollout_account(4, [make_sample(2), make_sample(3, Exclusion.AUXILIARY)])
    with pytest.raises(AccountingError, match="negative"):
        TokenAccount(0, -1, {Exclusion.UNALIGNED: 1})
