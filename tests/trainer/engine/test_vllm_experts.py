"""Mixtures of experts in vLLM's CPU build, with our plug-in and without (`make test-vllm`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.models import reference
from tests.trainer.support.vllm import PROMPT, SETTINGS, check, probe, reload, save_experts, start
from trainer.engine.base import EngineError, Generation, GenerationRequest, Sampling
from trainer.engine.vllm import VllmEngine
from trainer.engine.vllm_cpu import ROUTES

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")
pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


def agreement(path: Path, prompt: Sequence[int], answer: Generation, routes_from: int) -> tuple[int, int]:
    """(token and layer pairs whose experts are those of transformers' router, all of them)."""
    assert answer.routes is not None and answer.routes.dtype == np.uint8
    _, expected = reference(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), [*prompt, *answer.token_ids])
    assert expected is not None
    wanted = expected[routes_from:-1].sort(-1).values.numpy()
    assert answer.routes.shape == wanted.shape
    same = (np.sort(answer.routes, -1) == wanted).all(-1)
    return int(same.sum()), same.size


async def test_routes_are_those_of_the_model_and_new_weights_are_exact(tmp_path: Path) -> None:
    one, other = save_experts(tmp_path / "one", 0), save_experts(tmp_path / "other", 1)
    vllm = start(one, max_num_batched_tokens=64, **ROUTES)  # longer prompts come in pieces
    try:
        engine, sampling = VllmEngine(vllm), Sampling(0.7, 24, ())
        counts = list[tuple[int, int]]()

        async def turn(path: Path, prompt: list[int], routes_from: int) -> Generation:
            answer = await engine.generate(GenerationRequest("a", prompt, sampling, routes_from))
            counts.append(agreement(path, prompt, answer, routes_from))
            return answer

        long = [5 + number * number % 83 for number in range(500)]
        first = await turn(one, long, 0)
        await turn(one, [*long, *first.token_ids, *PROMPT], len(long))  # its beginning comes from the cache
        await asyncio.gather(*(turn(one, long[start : start + 150 + start], start) for start in range(0, 60, 10)))
        begun = asyncio.Event()
        cut = GenerationRequest("a", PROMPT, Sampling(1.0, 1900, ()), on_tokens=lambda *_: begun.set())
        running = asyncio.create_task(engine.generate(cut))
        await begun.wait()
        fresh = await engine.generate(GenerationRequest("b", PROMPT, Sampling(0, 24, ())))

        await engine.update_weights(reload(vllm, other), 1, probe(other))
        partial = await running
        assert partial.stop_reason == "aborted"
        counts.append(agreement(one, PROMPT, partial, 0))
        check(other, await turn(other, PROMPT, 0), 0.7)
        await engine.update_weights(reload(vllm, one), 2, probe(one))
        again = await engine.generate(GenerationRequest("b", PROMPT, Sampling(0, 24, ())))
        assert (again.token_ids, again.version) == (fresh.token_ids, 2)
        assert np.abs(np.subtract(again.log_probs, fresh.log_probs)).max() < 1e-5
        assert again.routes is not None and np.array_equal(again.routes, fresh.routes)
        same, rows = map(sum, zip(*counts, strict=True))
        print(f"routes: {same} of {rows} are those of transformers' router ({same / rows:.5f}); new weights equal a fresh load")
        assert same / rows >= 0.999
    finally:
        vllm.shutdown()


async def test_what_the_build_makes_of_new_experts_without_the_plug_in_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    one, other = save_experts(tmp_path / "one", 0), save_experts(tmp_path / "other", 1)
    vllm = start(one)
    try:
        with pytest.raises(EngineError, match=r"differ from the trainer's by [\d.]+ nats on average"):
            await VllmEngine(vllm).update_weights(reload(vllm, other), 1, probe(other))
    finally:
        vllm.shutdown()
