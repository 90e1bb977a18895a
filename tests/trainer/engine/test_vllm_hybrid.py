"""Experts between layers of linear attention (Qwen3-Next) in vLLM's CPU build, up to the end of the context (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.models import reference
from tests.trainer.support.vllm import SETTINGS, probe, reload, save_hybrid, start
from trainer.engine.base import Generation, GenerationRequest, Sampling
from trainer.engine.vllm import VllmEngine
from trainer.engine.vllm_cpu import ROUTES
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy
from trainer.verl_plugin.update import _coverage

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")
pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CONTEXT = 2048


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


class Announcing:
    """An engine that says when it has begun to answer."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self.begun = engine, asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        def take(ids: list[int], log_probs: list[float]) -> None:
            self.begun.set()
            assert request.on_tokens is not None
            request.on_tokens(ids, log_probs)

        return await self._engine.generate(dataclasses.replace(request, on_tokens=take))


async def chat(http: httpx.AsyncClient, messages: list[dict[str, Any]]) -> bool:
    """Whether there was an answer, which is appended."""
    response = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    if response.status_code == httpx.codes.OK:
        messages.append(response.json()["choices"][0]["message"])
    return response.status_code == httpx.codes.OK


async def test_routes_cover_a_session_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """Turns through the proxy with new weights in the middle of the second, until the context is full. The build's linear attention
    takes bf16 only, so engine and transformers, which computes in fp32, choose other experts now and then: that is what replay is for."""
    old, new = save_hybrid(tmp_path / "old", 0), save_hybrid(tmp_path / "new", 1)
    vllm = start(old, dtype="bfloat16", max_model_len=CONTEXT, max_num_batched_tokens=256, **ROUTES)
    engine = VllmEngine(vllm)
    watched, rendering = Announcing(engine), Rendering.load(old)
    proxy = Proxy(watched, rendering)
    await proxy.start()
    try:
        url = await proxy.open("r", "k", Sampling(1.0, 160, ()), Limits(20, CONTEXT), "test")
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": "k"}, timeout=300) as http:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "begin " + "with what is there " * 20}]
            assert await chat(http, messages)
            messages.append({"role": "user", "content": "go on"})
            watched.begun.clear()
            second = asyncio.create_task(chat(http, messages))
            await watched.begun.wait()
            await engine.update_weights(reload(vllm, new), 1, dataclasses.replace(probe(new), tolerance=0.3))
            proxy.set_version(1)
            assert await second
            while True:
                messages.append({"role": "user", "content": "and then " + "do the next thing " * 12})
                if not await chat(http, messages):
                    break
        capture = await proxy.close("r")
    finally:
        await proxy.stop()
        vllm.shutdown()

    samples = capture.samples()
    sample = max(samples, key=lambda sample: len(sample.tokens))
    assert sample.routes is not None and len(sample.tokens) > 0.7 * CONTEXT and len(capture.graph.turns[1].spans) == 2
    found = _coverage(samples)
    rows = sum(len(sample.tokens) - 1 for sample in samples)
    reasons, missing = [str(sample.reason) for sample in samples], found["lego/routing/missing"]
    print(f"samples {reasons}, the longest of {len(sample.tokens)} tokens: {missing:.0f} of {rows} rows missing")
    assert missing == 0
    assert [found[f"lego/routing/coverage/decile_{tenth}"] for tenth in range(1, 11)] == [1] * 10

    # Rows stand where they belong, from the first tenth to the last: transformers' own router chooses the same experts nearly always, under
    # the one weights or the other.
    same = np.zeros(sample.routes[:-1].shape[:2], bool)
    for path in (old, new):  # that another one of 28 pairs is one of theirs by chance does not matter here
        _, own = reference(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), sample.tokens.tolist())
        assert own is not None
        same |= (np.sort(sample.routes[:-1], -1) == own[:-1].sort(-1).values.numpy()).all(-1)
    tenths = [float(part.mean()) for part in np.array_split(same.mean(-1), 10)]
    shares = " ".join(f"{share:.3f}" for share in tenths)
    print(f"share of (token, layer) rows with the experts of transformers' router, per tenth: {shares}")
    assert min(tenths) > 0.9
