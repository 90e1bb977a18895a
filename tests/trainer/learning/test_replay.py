from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from tests.trainer.models import VOCAB, make_model, reference
from trainer.learning.fidelity import Fidelity, fidelity
from trainer.learning.replay import ReplayCounts, RoutingReplay


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model(moe=True)


def tokens(seed: int, length: int = 24) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


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


def sample_in_bf16(model: PreTrainedModel, prompt: list[int], number: int) -> tuple[list[int], list[float], torch.Tensor]:
    """(tokens, log-probs, routes) drawn token by token behind a KV cache in bf16."""
    low = copy.deepcopy(model).to(torch.bfloat16)
    caught: list[list[torch.Tensor]] = []
    for router in [module for module in low.modules() if type(module).__name__.endswith("TopKRouter")]:
        caught.append(layer := [])
        router.register_forward_hook(lambda _m, _i, out, layer=layer: layer.append(out[2]))
    ids, log_probs, cache, new = list(prompt), [], None, list(prompt)
    generator = torch.Generator().manual_seed(len(prompt))
    with torch.no_grad():
        for _ in range(number):
            out = low(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            distribution = out.logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            log_probs.append(float(distribution[token]))
            new = [token]
            ids.append(token)
    return ids, log_probs, torch.stack([torch.cat(layer) for layer in caught], 1)


def test_replay_closes_most_of_the_gap_to_a_bf16_sampler_and_a_shift_opens_it() -> None:
    """Measured on three such models: k3 falls 9 to 26 times under replay, and routes shifted by one position raise it 60 to 150 times."""
    model = make_model(moe=True, tied=False, hidden_size=128, num_hidden_layers=4, head_dim=32, moe_intermediate_size=64)
    rollout: list[float] = []
    trainer: dict[str, list[float]] = {"own": [], "replay": [], "shifted": []}
    sampled = [sample_in_bf16(model, tokens(seed, 16), 64) for seed in range(6)]
    replay = RoutingReplay(model)
    for ids, log_probs, routes in sampled:
        rollout += log_probs
        shifted = torch.cat([routes[:1], routes[:-1]])
        for name, used in (("own", None), ("replay", routes), ("shifted", shifted)):
            replay.load(used)
            with torch.no_grad():
                distribution = logits(model, ids[:-1])[15:].log_softmax(-1)
            trainer[name] += distribution.gather(1, torch.tensor(ids[16:])[:, None])[:, 0].tolist()
    own, replayed, shifted = (fidelity(rollout, values, [True] * len(rollout)) for values in trainer.values())
    check_gap(own, replayed, shifted)


def check_gap(own: Fidelity, replayed: Fidelity, shifted: Fidelity) -> None:
    assert replayed.k3 < own.k3 / 4
    assert replayed.mean_abs < 0.7 * own.mean_abs
    assert replayed.p99_abs < own.p99_abs
    assert shifted.mean_abs > 8 * own.mean_abs
    assert shifted.pearson < own.pearson < replayed.pearson
