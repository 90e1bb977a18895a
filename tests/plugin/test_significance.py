from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.significance import rise_p_value


@pytest.mark.parametrize(
    ("before", "after", "p"),
    [
        ((1, 4), (3, 4), 17 / 70),  # Fisher's tea: 3 of 4 cups right
        ((1, 6), (8, 10), 280 / 11440),
        ((0, 1), (0, 1), 1.0),
        ((0, 96), (96, 96), 1 / comb(192, 96)),
    ],
)
def test_known_values(before: tuple[int, int], after: tuple[int, int], p: float) -> None:
    assert rise_p_value(*before, *after) == pytest.approx(p, rel=1e-12, abs=0)


def test_the_demo_bar() -> None:
    """A rise from .27 to .52 on 96 rollouts each is far below .05; one of two points is not."""
    assert rise_p_value(26, 96, 50, 96) < 0.001
    assert rise_p_value(26, 96, 28, 96) > 0.3


def test_counts_must_fit_their_samples() -> None:
    with pytest.raises(ValueError, match="97/96"):
        rise_p_value(1, 96, 97, 96)


samples = st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(samples, samples)
def test_rise_and_fall_share_only_the_observed_table(before: tuple[int, int], after: tuple[int, int]) -> None:
    """The two tails overlap in exactly the observed table, so together they weigh at least 1."""
    rise, fall = rise_p_value(*before, *after), rise_p_value(*after, *before)
    assert 0 < rise <= 1
    assert rise + fall >= 1 - 1e-9


@given(samples, samples)
def test_more_solved_afterwards_is_never_weaker_evidence(before: tuple[int, int], after: tuple[int, int]) -> None:
    solved, n = after
    if solved < n:
        assert rise_p_value(*before, solved + 1, n) <= rise_p_value(*before, solved, n) + 1e-12
