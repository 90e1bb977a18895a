"""The negative control of routing replay: one bf16 sampler against an fp32 trainer, with replay off, misaligned by one position, aligned.

Random weights of a wide initialisation flip many expert choices between the two precisions, so the effect is large. Correlation alone
barely moves; k3 does, and a shift of one position must make everything worse.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from trainer.learning.fidelity import fidelity
from trainer.learning.replay import RoutingReplay

VOCAB, PROMPT = 512, 16
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, slots=True)
class Rollout:
    """`tokens` (prompt and sampled), `log_probs` of the sampled ones, `routes` [len(tokens) - 1, layers, top_k]."""

    tokens: list[int]
    log_probs: list[float]
    routes: Tensor


@dataclass(frozen=True, slots=True)
class Gap:
    """Trainer against rollout over the sampled tokens: correlation of log-probs, mean |Δ log p| in nats, mean |Δ p|, k3 in nats."""

    pearson: float
    mean_abs_dlogp: float
    mean_abs_dp: float
    k3: float


@dataclass(frozen=True, slots=True)
class Aligned(Gap):
    """`overlap`: share of the sampler's experts that the trainer would have chosen itself; `top1`: share of (token, layer) rows whose
    first expert is the trainer's first; `coverage`: share of (input token, layer) rows that were replayed."""

    overlap: float
    top1: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Control:
    off: Gap
    misaligned: Gap
    aligned: Aligned

    @property
    def passed(self) -> bool:
        """Whether replay works and its control does not: the bounds hold for every such model that was measured."""
        off, misaligned, aligned = self.off, self.misaligned, self.aligned
        closes = aligned.k3 < off.k3 / 4 and aligned.pearson >= 0.999 and aligned.coverage >= 0.998 and aligned.top1 >= 0.985
        return closes and misaligned.mean_abs_dlogp > 8 * off.mean_abs_dlogp

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def run(seed: int = 0, rollouts: int = 8, length: int = 96) -> Control:
    """Sample `rollouts` answers of `length` tokens in bf16 and score them three times in fp32, on one torch thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(seed, rollouts, length)
    finally:
        torch.set_num_threads(threads)


def _run(seed: int, rollouts: int, length: int) -> Control:
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).eval()
    draws = torch.Generator().manual_seed(seed)
    prompts = torch.randint(VOCAB, (rollouts, PROMPT), generator=draws).tolist()
    sampled = [sample(copy.deepcopy(model).to(torch.bfloat16), prompt, length, draws) for prompt in prompts]
    replay = RoutingReplay(model)
    off = _gap(model, replay, sampled, [None for _ in sampled])
    misaligned = _gap(model, replay, sampled, [torch.cat([one.routes[:1], one.routes[:-1]]) for one in sampled])
    replay.take()
    aligned = _gap(model, replay, sampled, [one.routes for one in sampled])
    counts = replay.take()
    rows = sum(len(one.tokens) - 1 for one in sampled) * replay.layers
    return Control(off, misaligned, Aligned(**asdict(aligned), overlap=counts.overlap, top1=counts.top1, coverage=counts.replayed / rows))


@torch.no_grad()
def sample(model: Qwen3MoeForCausalLM, prompt: list[int], length: int, draws: torch.Generator) -> Rollout:
    """Token by token behind a KV cache, as an engine does; the experts of every input token are recorded."""
    tokens, log_probs, cache, new = list(prompt), [], None, list(prompt)
    with _recorded(model) as layers:
        for _ in range(length):
            out = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            distribution = out.logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=draws))
            log_probs.append(float(distribution[token]))
            new = [token]
            tokens.append(token)
        return Rollout(tokens, log_probs, torch.stack([torch.cat(layer) for layer in layers], 1))


@contextmanager
def _recorded(model: Qwen3MoeForCausalLM) -> Iterator[list[list[Tensor]]]:
    """Per layer, the chosen experts of each forward pass, [tokens, top_k]."""
    layers: list[list[Tensor]] = []
    handles = []
    for router in (module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)):
        layer: list[Tensor] = []
        layers.append(layer)
        handles.append(router.register_forward_hook(lambda _m, _i, out, layer=layer: layer.append(out[2])))
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _gap(model: Qwen3MoeForCausalLM, replay: RoutingReplay, sampled: list[Rollout], routes: list[Tensor | None] | list[Tensor]) -> Gap:
    rollout, trainer = list[float](), list[float]()
    for one, used in zip(sampled, routes, strict=True):
        replay.load(used)
        first = len(one.tokens) - len(one.log_probs)
        distribution = model(torch.tensor([one.tokens[:-1]])).logits[0, first - 1 :].log_softmax(-1)
        rollout += one.log_probs
        trainer += distribution.gather(1, torch.tensor(one.tokens[first:])[:, None])[:, 0].tolist()
    found = fidelity(rollout, trainer, np.ones(len(rollout)))
    return Gap(found.pearson, found.mean_abs, float(np.abs(np.exp(trainer) - np.exp(rollout)).mean()), found.k3)
