from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

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


def hybrid(family: str) -> PreTrainedModel:
    """Three layers of linear attention and one of full attention, as Qwen3-Next and Qwen3.5 have them."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "intermediate_size": 32,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    made: PreTrainedModel = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes))
    if family == "qwen3.5":
        made = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes))
    for name, parameter in made.named_parameters():
        if "gate.weight" in name:  # transformers leaves routers at zero
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval()


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
def test_a_hybrid_attention_model_is_covered_at_full_length(family: str) -> None:
    """Every layer of every token, the last third as well: a buffer that is too small loses the ends of long sequences."""
    model, ids, length = hybrid(family), tokens(3, 600), 600
    replay, chosen = RoutingReplay(model), list[torch.Tensor]()
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    assert replay.layers == len(routers) == 4
    recording = [router.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for router in routers]
    native = logits(model, ids).detach()
    for handle in recording:
        handle.remove()
    routes = torch.stack(chosen, 1)
    replay.load(routes)
    assert torch.allclose(logits(model, ids), native, atol=1e-5)
    own = replay.take()
    assert (own.replayed, own.native) == (4 * length, 0) and own.overlap > 0.999
    replay.load((routes + 1) % 8)
    assert not torch.allclose(logits(model, ids)[-200:], native[-200:], atol=1e-2)
    assert replay.take().overlap < 0.9


def test_routes_for_a_model_without_known_routers_are_refused() -> None:
    with pytest.raises(ValueError, match="routes of 4 layers for a model with 0 routed ones"):
        RoutingReplay(make_model(moe=False)).load(torch.zeros(3, 4, 2, dtype=torch.int16))
