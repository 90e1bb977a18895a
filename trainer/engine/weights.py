"""Qwen3 and Qwen3-MoE checkpoints: what the CPU engine supports, and HF tensor names packed into the layout its forward wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a policy. `experts` 0 is a dense model; otherwise every layer is routed."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    tied: bool
    experts: int
    top_k: int
    normalise_top_k: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Shape:
        """Shape of a HF configuration (`config.json` or `PretrainedConfig.to_dict()`). Raises ValueError for what the engine lacks."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        moe = config["model_type"] == "qwen3_moe"
        refused = {
            "model_type": config["model_type"] not in ("qwen3", "qwen3_moe"),
            "rope_parameters": rope.get("rope_type", "default") != "default",
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(config.get("attention_bias")),
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "mlp_only_layers": moe and bool(config.get("mlp_only_layers")),
            "decoder_sparse_step": moe and config.get("decoder_sparse_step", 1) != 1,
        }
        for key, unsupported in refused.items():
            if unsupported:
                raise ValueError(f"the CPU engine does not support {key} = {config.get(key)!r}; it runs plain Qwen3 and Qwen3-MoE")
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
            tied=bool(config.get("tie_word_embeddings")),
            experts=(config.get("num_experts") or config["num_local_experts"]) if moe else 0,
            top_k=config["num_experts_per_tok"] if moe else 0,
            normalise_top_k=bool(config.get("norm_topk_prob", False)),
        )


@dataclass(frozen=True, slots=True)
class Mlp:
    """`gate_up` [2 ff, d]: the gate's rows, then the up projection's. `down` [d, ff]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """A routed block with E experts, stored twice because the two ways to compute it want different orders.

    `gate_up` [E, 2 ff, d] and `down` [E, d, ff] per expert; `all_gate_up` [2 E ff, d] (all gates, then all ups) and `all_down` [d, E ff]
    as if the experts were one wide MLP. `router` [E, d].
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    all_gate_up: Tensor
    all_down: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """`qkv` [(heads + 2 kv) head_dim, d]; `qk_norm` [heads + kv, head_dim], one row per head."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(configuration, named tensors) of a HF checkpoint directory with safetensors files."""
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {path}")
    named: dict[str, Tensor] = {}
    for file in files:
        named.update(load_file(file))
    return json.loads((path / "config.json").read_text()), named


def pack(shape: Shape, named: Mapping[str, Tensor]) -> Weights:
    """fp32 copies of HF-named tensors, in the engine's layout. Experts may be fused (transformers 5) or one by one (as verl streams them).

    Raises ValueError when a tensor is missing or has another size than the model's.
    """

    def get(name: str, *size: int) -> Tensor:
        if name not in named:
            raise ValueError(f"the weights lack {name}")
        tensor = named[name].detach().to(torch.float32, copy=True)
        if size and tuple(tensor.shape) != size:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the model wants {size}")
        return tensor

    def experts(prefix: str) -> Experts:
        if f"{prefix}experts.gate_up_proj" in named:
            gate_up, down = get(f"{prefix}experts.gate_up_proj"), get(f"{prefix}experts.down_proj")
        else:
            each = [f"{prefix}experts.{index}." for index in range(shape.experts)]
            gate_up = torch.stack([torch.cat([get(f"{e}gate_proj.weight"), get(f"{e}up_proj.weight")]) for e in each])
            down = torch.stack([get(f"{e}down_proj.weight") for e in each])
        gates, ups = gate_up.chunk(2, 1)
        wide = torch.cat([gates.reshape(-1, shape.hidden), ups.reshape(-1, shape.hidden)])
        all_down = down.transpose(0, 1).reshape(shape.hidden, -1).contiguous()
        return Experts(get(f"{prefix}gate.weight", shape.experts, shape.hidden), gate_up, down, wide, all_down)

    def layer(prefix: str) -> Layer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        width, d = shape.head_dim, shape.hidden
        q = get(f"{attention}q_proj.weight", shape.heads * width, d)
        k = get(f"{attention}k_proj.weight", shape.kv_heads * width, d)
        v = get(f"{attention}v_proj.weight", shape.kv_heads * width, d)
        q_norm = get(f"{attention}q_norm.weight", width).expand(shape.heads, -1)
        k_norm = get(f"{attention}k_norm.weight", width).expand(shape.kv_heads, -1)
        block: Mlp | Experts
        if shape.experts:
            block = experts(mlp)
        else:
            block = Mlp(torch.cat([get(f"{mlp}gate_proj.weight"), get(f"{mlp}up_proj.weight")]), get(f"{mlp}down_proj.weight"))
        return Layer(
            input_norm=get(f"{prefix}input_layernorm.weight", d),
            qkv=torch.cat([q, k, v]),
            qk_norm=torch.cat([q_norm, k_norm]),
            out=get(f"{attention}o_proj.weight", d, shape.heads * width),
            mlp_norm=get(f"{prefix}post_attention_layernorm.weight", d),
            mlp=block,
        )

    embed = get("model.embed_tokens.weight", shape.vocab, shape.hidden)
    return Weights(
        embed=embed,
        layers=[layer(f"model.layers.{index}.") for index in range(shape.layers)],
        norm=get("model.norm.weight", shape.hidden),
        head=embed if shape.tied else get("lm_head.weight", shape.vocab, shape.hidden),
    )
