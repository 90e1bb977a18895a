"""A tiny random Qwen3-MoE or Qwen3 checkpoint with a byte-level tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.vocabulary import byte_level


def save_policy(path: Path, seed: int = 0, *, dense: bool = False, tied: bool = True, head_dim: int = 16) -> Tokenizer:
    """Weights, configuration and tokenizer of an untrained policy; its experts differ enough that replayed routes matter."""
    tokenizer = byte_level()
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "bos_token_id": None,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if dense else Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    for name, parameter in model.named_parameters():
        if "experts" in name or "mlp.gate" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>").save_pretrained(path)
    return tokenizer
