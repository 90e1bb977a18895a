from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.learning.minibatches import partition

tokens = st.lists(st.integers(1, 500), max_size=80)


@given(tokens, st.integers(1, 9), st.integers(0, 2**32))
def test_every_rollout_is_in_one_minibatch_and_loads_are_balanced(sizes: list[int], count: int, seed: int) -> None:
    batches = partition(sizes, count, seed)
    assert len(batches) == count
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in batch) for batch in batches]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert sum(bool(batch) for batch in batches) == min(count, len(sizes))


@given(tokens, st.integers(1, 9), st.integers(0, 2**32))
def test_seed_alone_decides(sizes: list[int], count: int, seed: int) -> None:
    assert partition(sizes, count, seed) == partition(sizes, count, seed)


def test_seeds_differ() -> None:
    assert partition([10] * 32, 2, 0) != partition([10] * 32, 2, 1)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="mini-batches"):
        partition([1], 0, 0)
    with pytest.raises(ValueError, match="trained token"):
        partition([1, 0], 1, 0)
