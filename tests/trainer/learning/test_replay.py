from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from transformers import PreTrainedModel

from tests.trainer.models import VOCAB, make_model, reference
from trainer.learning.replay import ReplayCounts, RoutingReplay
from trainer.r3 import control


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model(moe=True)


def tokens(seed: int, length: int = 24) -> list[int]:
    ids: list[int] = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def test_replaying_a_models_own_routes_changes_nothing(model: PreTrainedModel) -> None:
    ids = tokens(0)
    _, routes = reference(model, ids)
    assert routes is not None
    native = logits(model, ids)
    replay = RoutingReplay(model)
    replay.load(routes.to(torch.int16))
    assert torch.equal(logits(model, ids), native)
    assert replay.take() == ReplayCounts(replayed=24 * 3, changed=0, native=0)
    assert replay.take() == ReplayCounts(0, 0, 0)


def test_rows_without_a_route_go_native_and_are_counted(model: PreTrainedModel) -> None:
    ids = tokens(1)
    _, routes = reference(model, ids)
    assert routes is not None
    native = logits(model, ids)
    routes[5:9] = 0
    routes[-1] = 0
    replay = RoutingReplay(model)
    replay.load(routes)
    assert torch.allclose(logits(model, ids), native, atol=1e-6)
    assert replay.take() == ReplayCounts(replayed=19 * 3, changed=0, native=5 * 3)


def test_other_routes_change_the_output_and_the_router_keeps_its_gradient(model: PreTrainedModel) -> None:
    ids = tokens(2)
    _, routes = reference(model, ids)
    assert routes is not None
    native = logits(model, ids).detach()
    replay = RoutingReplay(model)
    replay.load((routes + 1) % 16)
    replayed = logits(model, ids)
    assert (replayed - native).abs().max() > 0.1
    assert replay.take().changed > 0
    replayed.log_softmax(-1)[:, 3].sum().backward()
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    assert all(router.weight.grad.norm() > 0 for router in routers)


def test_order_of_the_experts_within_a_row_does_not_matter(model: PreTrainedModel) -> None:
    ids = tokens(3)
    _, routes = reference(model, ids)
    assert routes is not None
    replay = RoutingReplay(model)
    native = logits(model, ids)
    replay.load(routes.flip(-1))
    assert torch.allclose(logits(model, ids), native, atol=1e-5)
    assert replay.take().changed == 0


def test_hooks_do_nothing_without_routes_and_go_away(model: PreTrainedModel) -> None:
    ids = tokens(4)
    native = logits(model, ids)
    replay = RoutingReplay(model)
    assert torch.equal(logits(model, ids), native)
    replay.load(torch.randint(16, (24, 3, 4)))
    replay.load(None)
    assert torch.equal(logits(model, ids), native)
    replay.load(torch.arange(4).expand(24, 3, 4))
    assert not torch.equal(logits(model, ids), native)
    replay.remove()
    assert torch.equal(logits(model, ids), native)


def test_routes_that_do_not_fit_are_refused(model: PreTrainedModel) -> None:
    replay = RoutingReplay(model)
    with pytest.raises(ValueError, match="2 layers for a model with 3"):
        replay.load(torch.zeros(24, 2, 4, dtype=torch.int16))
    replay.load(torch.zeros(23, 3, 4, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"routes are \(23, 4\), the forward pass has \(24, 4\)"):
        logits(model, tokens(5))
    with pytest.raises(ValueError, match="at least two experts"):
        RoutingReplay(make_model(moe=True, top_k=1))


def test_a_dense_model_has_nothing_to_replay() -> None:
    assert RoutingReplay(make_model(moe=False)).layers == 0


def test_agreement_with_the_trainers_own_choice_is_counted(model: PreTrainedModel) -> None:
    """One of four experts of every row is replaced, never the first: three quarters are shared and every first expert agrees."""
    ids = tokens(6)
    _, routes = reference(model, ids)
    assert routes is not None
    native = logits(model, ids)
    replay = RoutingReplay(model)
    replay.load(routes)
    logits(model, ids)
    counts = replay.take()
    assert (counts.overlap, counts.top1) == (1, 1)
    first_layer = routes.clone()
    for row in range(24):
        first_layer[row, 0, 3] = next(expert for expert in range(16) if expert not in routes[row, 0].tolist())
    replay.load(torch.cat([first_layer[:, :1], torch.zeros_like(routes[:, 1:])], 1))  # the other layers go native
    assert not torch.equal(logits(model, ids), native)
    counts = replay.take()
    assert (counts.replayed, counts.overlap, counts.top1) == (24, 0.75, 1)


@pytest.mark.slow
def test_replay_closes_the_gap_to_a_bf16_sampler_and_a_shift_opens_it() -> None:
    found = control.run(rollouts=4)
    assert found.passed
    assert found.misaligned.pearson < found.off.pearson < found.aligned.pearson
    assert 0.9 < found.aligned.overlap < 1


def test_the_control_fails_without_replay() -> None:
    """What a routing replay that does nothing, or one that is off by one, would show."""
    found = control.run(rollouts=2)
    idle = replace(found.aligned, **asdict(found.off))
    shifted = replace(found.aligned, **asdict(found.misaligned))
    assert not any(replace(found, aligned=broken).passed for broken in (idle, shifted))
