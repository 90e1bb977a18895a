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
