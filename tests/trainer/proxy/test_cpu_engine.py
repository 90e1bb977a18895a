"""The proxy over the real CPU engine: streaming, new weights in the middle of a turn, and the audit by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from tests.trainer.models import reference
from tests.trainer.proxy.conftest import until
from tests.trainer.support.tiny_policy import save_policy
from trainer.capture.capture import Capture
from trainer.engine.base import Sampling
from trainer.engine.cpu import CpuEngine
from trainer.proxy.limits import Limits, Patience
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy

pytestmark = pytest.mark.anyio


async def streamed(proxy: Proxy, url: str, engine: CpuEngine, new: Any) -> str:
    """One streamed answer; the engine gets `new` weights as version 1 when the first text has arrived."""
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello."}]}
    got = ""
    async with (
        httpx.AsyncClient(verify=False, timeout=60) as http,  # noqa: S501 plain HTTP
        http.stream("POST", f"{url}/v1/chat/completions", json=body, headers={"x-api-key": "k"}) as answer,
    ):
        async for part in answer.aiter_text():
            if not got and part:
                proxy.set_version(1)
                engine.set_weights(new, 1)
            got += part
    return got


async def test_new_weights_in_the_middle_of_a_streamed_turn(tmp_path: Path) -> None:
    """39: the turn goes on behind its tokens, each piece under its own weights and none of the old KV; the client sees one answer."""
    for seed in (0, 1):
        save_policy(tmp_path / str(seed), seed)
    old, new = (Qwen3MoeForCausalLM.from_pretrained(tmp_path / str(seed), dtype=torch.float32).eval() for seed in (0, 1))
    engine, rendering = CpuEngine.from_checkpoint(tmp_path / "0", context=1024), Rendering.load(tmp_path / "0")
    proxy = Proxy(engine, rendering, Patience(backoff=0.001))
    await proxy.start()
    url = await proxy.open("r", "k", Sampling(1.0, 200, ()), Limits(5, 1000), "test")
    got = await streamed(proxy, url, engine, dict(new.state_dict()))
    capture = await proxy.close("r")
    await proxy.stop()

    (turn,) = capture.graph.turns
    (first, version), (cut, later) = turn.spans
    assert (first, version, later) == (0, 0, 1) and 0 < cut < len(turn.sampled) == 200
    check(capture, cut, old, new)
    chunks = [json.loads(line[6:]) for line in got.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == turn.message.content and got.endswith("data: [DONE]\n\n")
    assert proxy.take_metrics()["lego/engine/resumed"] == 1


def check(capture: Capture, cut: int, old: Any, new: Any) -> None:
    """Log-probs are those of the weights that sampled each token, given all tokens before it; so are the routes of what was sampled."""
    (sample,) = capture.samples()
    where = np.flatnonzero(sample.mask)
    for model, at in ((old, where[:cut]), (new, where[cut:])):
        log_probs, routes = reference(model, sample.tokens.tolist())
        expected = log_probs[torch.tensor(at - 1), torch.tensor(sample.tokens[at])]
        np.testing.assert_allclose(sample.log_probs[at], expected, atol=1e-4)
        assert routes is not None and sample.routes is not None
        inputs = at[:-1]  # the last token of each piece was an input of the next one only
        np.testing.assert_array_equal(sample.routes[inputs], routes[torch.tensor(inputs)])
        assert sample.routed[inputs].all()


async def test_a_client_that_leaves_frees_the_engine(tmp_path: Path) -> None:
    """25, with the real engine: nothing runs on, and the session's KV goes with the rollout."""
    save_policy(tmp_path)
    engine, rendering = CpuEngine.from_checkpoint(tmp_path, context=4000), Rendering.load(tmp_path)
    proxy = Proxy(engine, rendering)
    await proxy.start()
    url = await proxy.open("r", "k", Sampling(1.0, 3000, ()), Limits(5, 4000), "test")
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello."}]}
    async with (
        httpx.AsyncClient(verify=False, timeout=60) as http,  # noqa: S501 plain HTTP
        http.stream("POST", f"{url}/v1/chat/completions", json=body, headers={"x-api-key": "k"}) as answer,
    ):
        parts = answer.aiter_text()
        await anext(parts)
        assert engine.load == (1, 0, 1)
    await until(lambda: engine.load == (0, 0, 1))
    capture = await proxy.close("r")
    assert engine.load == (0, 0, 0) and capture.cancelled == 1 and capture.cancelled_tokens > 0
    await proxy.stop()
