"""GSPO against its closed form, autograd and finite differences, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainer.learning.clip import MAX_LOG_RATIO
from trainer.learning.gspo import rollout_log_ratios, row_log_ratios, surrogate

LOW, HIGH = 3e-4, 4e-4
NAN = float("nan")


def make_batch(rows: int = 6, width: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs with gradient, mask) with at least one trained token per row."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, width, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[:, 0] = True
    return log_probs, mask


def plain_gspo(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Eq. 1 as written, σ over all branches of a rollout and with its full gradient; a row counts |M_b|/|M|, which `weights` holds."""
    size = int(owner.max()) + 1
    sums = new.new_zeros(size).index_add(0, owner, ((new - old) * mask).sum(-1))
    tokens = new.new_zeros(size).index_add(0, owner, mask.sum(-1).to(new.dtype))
    sigma = (sums / tokens).exp()[owner]
    return -torch.minimum(sigma * weights, sigma.clamp(1 - LOW, 1 + HIGH) * weights).sum()


def test_only_ratios_beyond_the_clip_on_the_advantageous_side_are_clipped() -> None:
    log_probs, mask = make_batch()
    log_sigma = torch.tensor([5e-4, -5e-4, 2e-4, -2e-4, -9e-4, 9e-4], dtype=torch.float64)
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.1, 0.9, -0.3], dtype=torch.float64)
    result = surrogate(log_probs, log_probs.detach() - log_sigma[:, None], mask, advantages, torch.full((6,), NAN), LOW, HIGH)
    assert result.clipped.tolist() == [True, True, False, False, False, False]
    assert result.log_ratios == pytest.approx(log_sigma)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert not gradient[:2].any() and not gradient[~mask].any()
    closed = -(advantages * log_sigma.exp() / mask.sum(-1))[:, None] * mask * ~result.clipped[:, None]
    assert torch.allclose(gradient, closed, atol=1e-14)


@examples(30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 99))
def test_branches_have_value_and_gradient_of_the_rollout(numbers: list[int], seed: int) -> None:
    """Whatever rows belong together: the stop-gradient form equals Eq. 1 with σ over all branches and its full gradient."""
    log_probs, mask = make_batch(len(numbers), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    old = log_probs.detach() + 1e-3 * torch.randn(log_probs.shape, generator=generator, dtype=torch.float64)
    _, owner = torch.tensor(numbers).unique(return_inverse=True)
    advantages = torch.randn(int(owner.max()) + 1, generator=generator, dtype=torch.float64)
    tokens = mask.sum(-1)
    share = tokens / torch.zeros(len(advantages)).index_add(0, owner, tokens.float())[owner]
    weights = advantages[owner] * share
    log_sigma = rollout_log_ratios(row_log_ratios(log_probs, old, mask).detach(), tokens, torch.tensor(numbers))

    halves = [range(0, len(numbers) // 2), range(len(numbers) // 2, len(numbers))]  # branches may fall into different micro-batches
    parts = [
        surrogate(log_probs[list(half)], old[list(half)], mask[list(half)], weights[list(half)], log_sigma[list(half)], LOW, HIGH).loss
        for half in halves
        if half
    ]
    loss, plain = torch.stack(parts).sum(), plain_gspo(log_probs, old, mask, weights, owner)
    assert loss.item() == pytest.approx(plain.item(), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(loss, log_probs)[0], torch.autograd.grad(plain, log_probs)[0], atol=1e-12)


def test_gradient_agrees_with_finite_differences_of_eq_1() -> None:
    log_probs, mask = make_batch(3, 5)
    old = log_probs.detach() + 1e-5
    owner, tokens = torch.tensor([0, 0, 1]), mask.sum(-1)
    share = tokens / torch.tensor([tokens[0] + tokens[1], tokens[0] + tokens[1], tokens[2]])
    weights = torch.tensor([1.0, 1.0, -0.5], dtype=torch.float64) * share
    log_sigma = rollout_log_ratios(row_log_ratios(log_probs, old, mask).detach(), tokens, owner)
    (gradient,) = torch.autograd.grad(surrogate(log_probs, old, mask, weights, log_sigma, LOW, HIGH).loss, log_probs)
    step = 1e-6
    for row, column in mask.nonzero().tolist():
        bump = torch.zeros_like(log_probs)
        bump[row, column] = step
        high, low = (plain_gspo(log_probs.detach() + sign * bump, old, mask, weights, owner).item() for sign in (1, -1))
        assert gradient[row, column].item() == pytest.approx((high - low) / (2 * step), rel=1e-4)


def test_a_row_without_trained_tokens_gives_zero_and_masked_tokens_do_not_matter() -> None:
    log_probs, mask = make_batch(3)
    mask[1] = False
    old = log_probs.detach() + 1e-4
    weights, unknown = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64), torch.full((3,), NAN)
    before = surrogate(log_probs, old, mask, weights, unknown, LOW, HIGH)
    assert surrogate(log_probs[1:2], old[1:2], mask[1:2], weights[1:2], unknown[1:2], LOW, HIGH).loss.item() == 0
    for junk in (7.0, float("-inf"), NAN):
        spoiled = log_probs.detach().where(mask, junk).requires_grad_()
        after = surrogate(spoiled, old.where(mask, -junk), mask, weights, unknown, LOW, HIGH)
        assert after.loss.item() == before.loss.item()
        (gradient,) = torch.autograd.grad(after.loss, spoiled)
        assert torch.equal(gradient, torch.autograd.grad(before.loss, log_probs, retain_graph=True)[0])


def test_extreme_ratios_stay_finite() -> None:
    log_probs, mask = make_batch(2)
    weights = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for shift in (-1e4, 1e4):
        result = surrogate(log_probs, log_probs.detach() - shift, mask, weights, torch.full((2,), NAN), LOW, HIGH)
        (gradient,) = torch.autograd.grad(result.loss, log_probs)
        assert result.loss.abs().item() <= 2 * torch.tensor(MAX_LOG_RATIO).exp().item()
        assert gradient.isfinite().all()
