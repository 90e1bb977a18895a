"""A random policy for vLLM's CPU build, that engine started on it, and what transformers says of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.trainer.models import make_model
from trainer.engine.base import Generation
from trainer.engine.vllm import Probe
from trainer.vocabulary import byte_level

PROMPT = list(range(5, 60))


def save(path: Path, seed: int, tied: bool = False) -> Path:
    """A random dense policy; head_dim 64 is the least that vLLM's CPU attention takes here."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 64}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1, tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def save_experts(path: Path, seed: int) -> Path:
    """A random mixture of experts whose routers choose clearly."""
    model = make_model(
        moe=True,
        seed=seed,
        experts=8,
        top_k=2,
        tied=False,
        hidden_size=64,
        head_dim=64,
        moe_intermediate_size=32,
        max_position_embeddings=2048,
    )
    model.save_pretrained(path)
    return path


def save_hybrid(path: Path, seed: int) -> Path:
    """A random Qwen3-Next with a tokenizer: three layers of linear attention and one of full attention, experts in all. Its weights are
    those of bf16, which the CPU build's linear attention asks for, as it does for a head size of 128."""
    tokenizer = byte_level()
    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    model = Qwen3NextForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "experts" in name or "mlp.gate" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>").save_pretrained(path)
    return path


def check(path: Path, answer: Generation, temperature: float) -> None:
    """The log-probabilities are those of transformers on the same weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1)[torch.arange(len(answer.token_ids)), answer.token_ids]
    assert (torch.tensor(answer.log_probs) - expected).abs().max() < 1e-4


def probe(path: Path) -> Probe:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        log_probs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return Probe(PROMPT, log_probs[torch.arange(len(PROMPT) - 1), PROMPT[1:]].tolist(), tolerance=1e-3)


SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""vLLM's own environment variables, for the process that starts it."""


def start(path: Path, **arguments: Any) -> Any:
    """An `AsyncLLM` in fp32."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

    usual = {"max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True, "dtype": "float32", "skip_tokenizer_init": True}
    args = AsyncEngineArgs(model=str(path), logprobs_mode="processed_logprobs", kv_cache_memory_bytes=100_000_000, **(usual | arguments))
    return AsyncLLM.from_engine_args(args)


def reload(vllm: Any, path: Path) -> Callable[[], Coroutine[Any, Any, object]]:
    """What has that engine load the weights of `path`."""
    return lambda: vllm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
