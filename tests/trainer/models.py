"""Tiny random Qwen3 and Qwen3-MoE models, made by transformers itself, which is the reference."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 97


def make_model(
    *, moe: bool, seed: int = 0, experts: int = 16, top_k: int = 4, tied: bool = True, std: float = 0.1, **sizes: int
) -> PreTrainedModel:
    """fp32, initialised with a deviation large enough that the experts differ and the logits are far from flat. `sizes` are HF's names."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": std,
        **({"moe_intermediate_size": 24} if moe else {}),
        **sizes,
    }
    if not moe:
        return Qwen3ForCausalLM(Qwen3Config(**common)).eval()
    config = Qwen3MoeConfig(**common, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=True)
    model = Qwen3MoeForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "experts" in name or "mlp.gate" in name:
            torch.nn.init.normal_(parameter, std=std)
    return model


@torch.no_grad()
def reference(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs [n, vocab], routes [n, layers, top_k] or None) of transformers' own forward pass."""
    caught: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(lambda _m, _i, out: caught.append(out[2])) for router in routers]
    logits = model(torch.tensor([tokens])).logits[0].float()
    for handle in handles:
        handle.remove()
    return (logits / temperature).log_softmax(-1), torch.stack(caught, 1) if caught else None
