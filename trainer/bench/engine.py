"""Tokens per second of the CPU engine against transformers' own batched `generate`, on the same random model in the same run."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.engine.base import GenerationRequest, Sampling
from trainer.engine.cpu import CpuEngine
from trainer.engine.weights import Shape

DEMO = {
    "vocab_size": 702,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
"""The size of the demo policy; the weights are random, which costs the same."""
PROMPT, ANSWER, OBSERVATION = 60, 16, 26
"""Tokens of a first prompt, of an answer, and of what a harness adds behind it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over `runs`; the two sides take turns, so that other load meets both. Rates count sampled tokens only."""

    sessions: int
    turns: int
    runs: int
    engine_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float

    @property
    def line(self) -> str:
        return (
            f"{self.sessions:3d} sessions x {self.turns} turns: engine {self.engine_tokens_per_s:8,.0f} tokens/s, "
            f"transformers {self.transformers_tokens_per_s:7,.0f} tokens/s, ratio {self.ratio:.1f}  (medians of {self.runs})"
        )


def compare(sessions: int, turns: int, runs: int) -> Comparison:
    """`sessions` conversations at once, `turns` answers each. transformers gets all of them as one batch of equal length, its best case,
    and prefills the whole conversation on every turn, having no cache across calls; the engine reuses the session's."""
    model = _model()
    engine = CpuEngine(Shape.from_hf(model.config.to_dict()), model.state_dict(), context=512)
    prompts = np.random.default_rng(0).integers(DEMO["vocab_size"], size=(sessions, PROMPT)).tolist()
    sides: list[Callable[[], None]] = [
        lambda: asyncio.run(_engine_run(engine, prompts, turns)),
        lambda: _transformers_run(model, prompts, turns),
    ]
    for side in sides:
        side()
    seconds = [[_timed(side) for side in sides] for _ in range(runs)]
    ours, theirs = (statistics.median(column) for column in zip(*seconds, strict=True))
    tokens = sessions * turns * ANSWER
    return Comparison(sessions, turns, runs, tokens / ours, tokens / theirs, theirs / ours)


def run(runs: int) -> list[Comparison]:
    """The demo's cases: one session, a step's worth at once, and whole conversations. Uses one torch thread and restores the setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [compare(1, 1, runs), compare(64, 1, runs), compare(64, 3, runs)]
    finally:
        torch.set_num_threads(before)


def as_json(comparisons: list[Comparison]) -> dict[str, Any]:
    return {"model": DEMO, "prompt_tokens": PROMPT, "answer_tokens": ANSWER, "comparisons": [asdict(item) for item in comparisons]}


def _model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DEMO)).eval()


async def _engine_run(engine: CpuEngine, prompts: list[list[int]], turns: int) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=ANSWER, stop_token_ids=())

    async def converse(session: str, prompt: list[int]) -> None:
        for _ in range(turns):
            answer = await engine.generate(GenerationRequest(session, prompt, sampling))
            prompt = [*prompt, *answer.token_ids, *range(OBSERVATION)]
        engine.release(session)

    await asyncio.gather(*(converse(str(index), prompt) for index, prompt in enumerate(prompts)))


@torch.inference_mode()
def _transformers_run(model: Qwen3MoeForCausalLM, prompts: list[list[int]], turns: int) -> None:
    tokens = torch.tensor(prompts)
    observation = torch.arange(OBSERVATION).expand(len(prompts), -1)
    for _ in range(turns):
        tokens = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=ANSWER,
            max_new_tokens=ANSWER,
            pad_token_id=0,
            eos_token_id=None,
        )
        tokens = torch.cat([tokens, observation], 1)


def _timed(side: Callable[[], None]) -> float:
    started = time.perf_counter()
    side()
    return time.perf_counter() - started
