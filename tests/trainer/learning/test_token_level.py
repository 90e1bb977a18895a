"""Token-level PPO and GRPO and the KL term against closed forms, autograd and verl's own losses, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainer.learning.test_gspo import make_batch
from trainer.learning.advantages import DELTA, group_advantages
from trainer.learning.gspo import surrogate as gspo_surrogate
from trainer.learning.kl import low_variance_kl
from trainer.learning.token_level import surrogate
from trainer.learning.weights import row_factors, token_factors

LOW, HIGH = 0.2, 0.28
NAN = float("nan")


def noise(like: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    return size * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_token_is_clipped_by_itself() -> None:
    log_probs, mask = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True), torch.tensor([[True, True, True], [True, True, False]])
    ratios = torch.tensor([[1.5, 1.1, 0.5], [1.5, 0.5, 9.0]], dtype=torch.float64)
    result = surrogate(log_probs, -ratios.log(), mask, torch.tensor([1.0, -2.0], dtype=torch.float64), LOW, HIGH)
    assert result.loss.item() == pytest.approx(-(1.28 + 1.1 + 0.5) / 3 + 2 * (1.5 + 0.8) / 2)
    assert result.clipped.tolist() == pytest.approx([1 / 3, 1 / 2])
    assert result.log_ratios[1].item() == pytest.approx((math.log(1.5) + math.log(2)) / 2)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert gradient.tolist() == [pytest.approx([0, -1.1 / 3, -0.5 / 3]), pytest.approx([2 * 1.5 / 2, 0, 0])]


@examples(20)
@given(st.integers(0, 99))
def test_grpo_means_over_rollouts_and_ppo_over_tokens(seed: int) -> None:
    """Rows 0 and 1 are branches of one rollout; value and gradient equal the objective as written, whatever the micro-batches."""
    log_probs, mask = make_batch(5, seed=seed)
    old, owner = log_probs.detach() + noise(log_probs, 0.3, seed), [0, 0, 1, 2, 3]
    advantages = torch.tensor([1.0, -0.5, 0.7, -1.2], dtype=torch.float64)
    tokens = mask.sum(-1).tolist()
    ratio = (log_probs - old).exp()
    terms = torch.minimum(ratio * advantages[owner, None], ratio.clamp(1 - LOW, 1 + HIGH) * advantages[owner, None])
    by_rollout = [(terms * mask)[[row for row in range(5) if owner[row] == number]].sum() for number in range(4)]
    counts = [sum(tokens[row] for row in range(5) if owner[row] == number) for number in range(4)]
    written = {
        "grpo": sum(total / count for total, count in zip(by_rollout, counts, strict=True)) / 2 / 2,
        "ppo": sum(by_rollout) / (sum(counts) + 100),
    }
    factors = {
        "grpo": row_factors(owner, tokens, [0.5] * 4, groups=2, minibatches=1, global_batch_size=1),
        "ppo": token_factors(owner, tokens, total=sum(tokens) + 100, minibatches=1, global_batch_size=1),
    }
    for name, objective in written.items():
        weights = advantages[owner] * torch.from_numpy(factors[name])
        loss = sum(surrogate(*(x[rows] for x in (log_probs, old, mask, weights)), LOW, HIGH).loss for rows in (slice(0, 1), slice(1, 5)))
        assert loss.item() == pytest.approx(-objective.item(), abs=1e-12)
        expected = torch.autograd.grad(-objective, log_probs, retain_graph=True)[0]
        assert torch.allclose(torch.autograd.grad(loss, log_probs, retain_graph=True)[0], expected, atol=1e-12)


def test_tokens_beyond_the_mask_and_extreme_ratios_do_no_harm() -> None:
    log_probs, mask = make_batch(2)
    weights = torch.tensor([1.0, -1.0], dtype=torch.float64)
    spoiled = log_probs.detach().where(mask, NAN).requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(spoiled, log_probs.detach(), mask, weights, LOW, HIGH).loss, spoiled)
    assert gradient.isfinite().all() and not gradient[~mask].any()
    assert surrogate(log_probs, log_probs.detach() - 1e4, mask, weights, LOW, HIGH).loss.isfinite()


def test_a_correction_weighs_each_token_and_has_no_gradient_of_its_own() -> None:
    log_probs, mask = make_batch(3)
    old, weights = log_probs.detach() + 1e-4, torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    correction = noise(log_probs, 0.2, 1).exp().clamp(max=1.5)
    plain = torch.autograd.grad(surrogate(log_probs, old, mask, weights, LOW, HIGH).loss, log_probs)[0]
    weighed = torch.autograd.grad(surrogate(log_probs, old, mask, weights, LOW, HIGH, correction).loss, log_probs)[0]
    assert torch.allclose(weighed, plain * correction, atol=1e-15)
    unknown = torch.full((3,), NAN, dtype=torch.float64)
    sequence = gspo_surrogate(log_probs, old, mask, weights, unknown, LOW, HIGH, correction).loss
    plain = torch.autograd.grad(gspo_surrogate(log_probs, old, mask, weights, unknown, LOW, HIGH).loss, log_probs)[0]
    assert torch.allclose(torch.autograd.grad(sequence, log_probs)[0], plain * correction, atol=1e-15)


def test_low_variance_kl_has_value_and_gradient_of_its_closed_form() -> None:
    log_probs, mask = make_batch(3)
    reference, weights = log_probs.detach() + noise(log_probs, 0.5, 2), torch.tensor([0.1, 0.0, 0.3], dtype=torch.float64)
    loss = low_variance_kl(log_probs, reference.where(mask, NAN), mask, weights)
    difference = (reference - log_probs.detach()).where(mask, 0)
    tokens = mask.sum(-1)
    assert loss.item() == pytest.approx(float((weights * (difference.exp() - difference - 1).sum(-1) / tokens).sum()))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert torch.allclose(gradient, (weights / tokens)[:, None] * (1 - difference.exp()) * mask, atol=1e-14)
    assert low_variance_kl(log_probs, log_probs.detach(), mask, weights).item() == 0


def test_only_the_behaviour_ratio_is_eq_1_when_rollouts_lag() -> None:
    """A softmax policy one update ahead of the one that sampled: importance-weighted, the expected gradient is that of the reward under
    the policy itself. The ratio to captured log-probs gives it; the ratio to log-probs at the step's start gives the old policy's mean."""
    behaviour = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64).log_softmax(0)
    logits = torch.tensor([1.1, -0.4, 0.2], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64)
    (wanted,) = torch.autograd.grad(-(logits.softmax(0) * reward).sum(), logits)
    for base, exact in (("behaviour", True), ("recomputed", False)):
        now = logits.log_softmax(0)
        old = behaviour if base == "behaviour" else now.detach()
        # One row of one token per action; its weight is how often the behaviour policy takes it, times its reward.
        loss = surrogate(now[:, None], old[:, None], torch.ones(3, 1, dtype=torch.bool), behaviour.exp() * reward, 0.99, 99.0).loss
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.allclose(gradient, wanted, atol=1e-12) is exact, base


def test_the_deviation_leaves_delta_outside_and_no_signal_is_exactly_zero() -> None:
    rewards = [1, 0, None, 0]
    found = group_advantages(rewards)
    scored = np.array([1.0, 0.0, 0.0])
    assert found.advantages[0] == (scored[0] - scored.mean()) / (scored.std(ddof=1) + DELTA)
    assert DELTA == 1e-6 and found.advantages[2] == 0
    for none in ([None, 1, None, None], [1, 1, 1, None], [0.1 + 0.2, 0.1 + 0.2], [None, None]):
        assert not group_advantages(none).advantages.any()


@pytest.mark.slow
def test_verls_own_losses_agree_where_every_rollout_is_one_row() -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_gspo, compute_policy_loss_vanilla, kl_penalty
    from verl.workers.config import ActorConfig

    log_probs, mask = make_batch(4)
    old = log_probs.detach() + noise(log_probs, 0.2, 3)
    advantages = torch.tensor([1.0, -1.0, 0.3, -0.6], dtype=torch.float64)
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=LOW, clip_ratio_high=HIGH)
    object.__setattr__(config, "clip_ratio_c", 1e9)  # verl's third bound, of which the paper knows nothing, out of the way
    config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None)
    tokens, rows = mask.sum(-1).tolist(), range(4)
    mean = advantages * torch.from_numpy(row_factors(rows, tokens, [0.25] * 4, groups=1, minibatches=1, global_batch_size=1))
    each = advantages * torch.from_numpy(token_factors(rows, tokens, total=sum(tokens), minibatches=1, global_batch_size=1))
    unknown = torch.full((4,), NAN, dtype=torch.float64)
    cases = [
        (gspo_surrogate(log_probs, old, mask, mean, unknown, LOW, HIGH), compute_policy_loss_gspo, "seq-mean-token-mean"),
        (surrogate(log_probs, old, mask, mean, LOW, HIGH), compute_policy_loss_vanilla, "seq-mean-token-mean"),
        (surrogate(log_probs, old, mask, each, LOW, HIGH), compute_policy_loss_vanilla, "token-mean"),
    ]
    for ours, theirs, aggregation in cases:
        loss, _ = theirs(old, log_probs, advantages[:, None].expand_as(old), mask, aggregation, config)
        assert ours.loss.item() == pytest.approx(loss.item(), abs=1e-7)
        found, expected = (torch.autograd.grad(value, log_probs, retain_graph=True)[0] for value in (ours.loss, loss))
        assert torch.allclose(found, expected, atol=1e-7)
    kl = (kl_penalty(log_probs, old, "low_var_kl") * mask).sum(-1) / mask.sum(-1)
    assert low_variance_kl(log_probs, old, mask, torch.ones(4, dtype=torch.float64)).item() == pytest.approx(kl.sum().item())
