"""The demo policy's model: a Qwen3-MoE of about half a million parameters, as transformers builds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM


def config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """3 layers of width 64, 16 experts of width 48 of which 4 work per token, 4 heads of 32 over 2 key-value heads."""
    made = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=48,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        dtype="float32",
    )
    made.architectures = ["Qwen3MoeForCausalLM"]
    return made


def create(made: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    """Fresh weights: deviation 1/sqrt(fan-in), output projections scaled down by the square root of twice the depth."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(made)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                torch.nn.init.normal_(weight, std=0.02 if "embed_tokens" in name else 1 / math.sqrt(weight.shape[-1]))
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(1 / math.sqrt(2 * made.num_hidden_layers))
    return model


def inherit(model: Qwen3MoeForCausalLM, tokens: Mapping[str, int], parent: Path) -> int:
    """Start from a finished policy of the same shape: all its weights, and the embeddings of those tokens that both vocabularies have.
    Returns the number of those tokens.

    What is hard to learn, copying names and expressions, is then there already; new is the wording of other harnesses.
    """
    given, known = load(parent).state_dict(), Tokenizer.from_file(str(parent / "tokenizer.json")).get_vocab()
    shared = [(tokens[text], known[text]) for text in sorted(tokens.keys() & known.keys())]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" not in name:
                weight.copy_(given[name])
                continue
            for new, old in shared:
                weight[new] = given[name][old]
    return len(shared)


def load(directory: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32)
