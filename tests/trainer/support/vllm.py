"""A random policy for vLLM's CPU build, that engine started on it, and what transformers says of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.trainer.models import make_model
from trainer.engine.base import Generation
from trainer.engine.vllm import Probe

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
