from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trainer.learning.fidelity import fidelity

log_probs = arrays(np.float64, 20, elements=st.floats(-20, 0))


def test_known_numbers() -> None:
    rollout, trainer = np.log([0.5, 0.25, 0.5, 0.1]), np.log([0.5, 0.5, 0.25, 0.1])
    result = fidelity(rollout, trainer, np.ones(4))
    assert result.tokens == 4
    assert result.mean_abs == pytest.approx(math.log(2) / 2)
    assert result.max_abs == pytest.approx(math.log(2))
    assert result.p99_abs == pytest.approx(math.log(2))
    assert result.k3 == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 4)
    assert result.pearson == pytest.approx(np.corrcoef(rollout, trainer)[0, 1])
    assert result.pearson_probability == pytest.approx(np.corrcoef(np.exp(rollout), np.exp(trainer))[0, 1])


def test_k3_estimates_the_divergence_of_the_rollout_from_the_trainer() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    tokens = np.random.default_rng(0).choice(3, 200_000, p=p)
    expected = float((p * np.log(p / q)).sum())
    assert fidelity(np.log(p)[tokens], np.log(q)[tokens], np.ones(len(tokens))).k3 == pytest.approx(expected, rel=0.02)


@given(log_probs, log_probs, arrays(bool, 20))
def test_what_is_not_trained_is_not_looked_at(rollout: np.ndarray, trainer: np.ndarray, mask: np.ndarray) -> None:
    spoiled = np.where(mask, trainer, np.nan)
    assert repr(fidelity(rollout, spoiled, mask)) == repr(fidelity(rollout, trainer, mask))


@given(log_probs, log_probs)
def test_bounds(rollout: np.ndarray, trainer: np.ndarray) -> None:
    result = fidelity(rollout, trainer, np.ones(20))
    assert result.k3 >= 0
    assert 0 <= result.mean_abs <= result.max_abs + 1e-12 and result.p99_abs <= result.max_abs + 1e-12
    assert math.isnan(result.pearson) or -1.000001 <= result.pearson <= 1.000001


def test_undefined_correlations() -> None:
    flat, slope = np.full(5, -1.0), np.linspace(-2, -1, 5)
    assert math.isnan(fidelity(flat, flat + 1e-8 * slope, np.ones(5)).pearson)
    assert fidelity(flat, slope, np.ones(5)).pearson == 0
    assert math.isnan(fidelity(slope, slope, [1, 0, 0, 0, 0]).pearson)
    assert math.isnan(fidelity(slope, slope, np.zeros(5)).k3)


def test_divergences_of_the_ratio() -> None:
    """Three tokens whose ratios are 1/2, 1 and 2."""
    ratios = np.array([0.5, 1.0, 2.0])
    result = fidelity(np.full(3, -3.0), np.log(ratios) - 3, np.ones(3))
    assert result.chi2 == pytest.approx((0.25 + 0 + 1) / 3)
    assert result.ess == pytest.approx(3.5**2 / 5.25 / 3)
    assert fidelity(np.full(3, -3.0), np.full(3, -3.0), np.ones(3)).ess == 1


def test_quantiles_are_over_trajectories() -> None:
    """Five trajectories of one token and one of a hundred: each counts once."""
    owner = np.array([0, 1, 2, 3, 4] + [5] * 100)
    size = np.array([0.1, 0.2, 0.3, 0.4, 0.5] + [9.0] * 100)
    result = fidelity(np.zeros(105), -size, np.ones(105), owner)
    assert result.trajectory_p50 == pytest.approx(0.35)
    assert result.trajectory_p99 == pytest.approx(np.quantile([0.1, 0.2, 0.3, 0.4, 0.5, 9.0], 0.99))


def test_every_token_is_in_the_histogram_once() -> None:
    differences = np.array([-5, -0.5, -0.05, -0.005, -0.0005, 0, 0.0005, 0.001, 0.05, 0.5, 5])
    result = fidelity(np.zeros(11), differences, np.ones(11))
    assert result.histogram == (1, 1, 1, 1, 3, 1, 1, 1, 1)
