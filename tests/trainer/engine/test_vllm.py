"""The real vLLM on a CPU (`make test-vllm`); skipped where its CPU build is not installed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.trainer.support.vllm import PROMPT, SETTINGS, check, probe, reload, save, start
from trainer.engine.base import EngineError, Generation, GenerationRequest, Sampling
from trainer.engine.vllm import VllmEngine

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")
pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


async def test_weights_that_it_takes_as_garbage_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our plug-in the CPU build of 0.31 leaves an output layer that is tied to the embedding as it was."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    old, new = save(tmp_path / "old", 0, tied=True), save(tmp_path / "new", 1, tied=True)
    vllm = start(old)
    try:
        engine = VllmEngine(vllm)
        check(old, await engine.generate(GenerationRequest("a", PROMPT, Sampling(0.7, 16, ()))), 0.7)
        with pytest.raises(EngineError, match=r"differ from the trainer's by [\d.]+ nats on average"):
            await engine.update_weights(reload(vllm, new), 1, probe(new))
    finally:
        vllm.shutdown()


@pytest.mark.parametrize("written", ["once", "twice"])
async def test_a_tied_output_layer_takes_new_weights_exactly(tmp_path: Path, written: str) -> None:
    """Also one that the checkpoint holds a second time, which vLLM loads apart and ties when it has seen that both are equal."""
    old, new = save(tmp_path / "old", 0, tied=True), save(tmp_path / "new", 1, tied=True)
    if written == "twice":
        for path in (old, new):
            named = load_file(path / "model.safetensors")
            named["lm_head.weight"] = named["model.embed_tokens.weight"].clone()
            save_file(named, path / "model.safetensors", {"format": "pt"})
    vllm = start(old)
    try:
        engine, greedy = VllmEngine(vllm), GenerationRequest("a", PROMPT, Sampling(0, 24, ()))
        fresh = await engine.generate(greedy)
        check(old, fresh, 1.0)
        await engine.update_weights(reload(vllm, new), 1, probe(new))
        check(new, await engine.generate(GenerationRequest("a", PROMPT, Sampling(0.7, 24, ()))), 0.7)
        await engine.update_weights(reload(vllm, old), 2, probe(old))
        again = await engine.generate(greedy)
        assert (again.token_ids, again.log_probs, again.version) == (fresh.token_ids, fresh.log_probs, 2)
    finally:
        vllm.shutdown()


async def test_streams_aborts_and_takes_new_weights(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 0), save(tmp_path / "new", 1)
    vllm = start(old)
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
        await engine.update_weights(reload(vllm, new), 1, probe(new))
        partial = await running
        assert (partial.stop_reason, partial.version) == ("aborted", 0) and partial.token_ids
        check(old, partial, 1.0)
        later = await engine.generate(GenerationRequest("a", PROMPT, Sampling(0.7, 16, ())))
        assert later.version == 1
        check(new, later, 0.7)
    finally:
        vllm.shutdown()


async def test_a_prompt_finds_its_beginning_in_the_cache_of_its_session_and_version_only(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 0), save(tmp_path / "new", 1)
    vllm = start(old)
    try:
        engine, prompt = VllmEngine(vllm), list(range(5, 205))
        unit = engine.kv().unit

        async def turn(salt: str, prompt: list[int]) -> tuple[Generation, int]:
            """The turn, and how many tokens of its prompt came from the cache."""
            before = engine.kv().reused
            answer = await engine.generate(GenerationRequest("s", prompt, Sampling(1.0, 40, ()), salt=salt))
            return answer, engine.kv().reused - before

        first, found = await turn("r-1/0", prompt)
        assert found == 0
        longer = [*prompt, *first.token_ids, *prompt[:20]]
        _, found = await turn("r-1/0", longer)
        assert found == (len(prompt) + 39) // unit * unit, "all whole blocks but for the last sampled token, which was never an input"
        assert (await turn("r-2/0", longer))[1] == 0, "another rollout's"
        await engine.update_weights(reload(vllm, new), 1, probe(new))
        answer, found = await turn("r-1/0", longer)  # as by a proxy that has not heard of the new version yet
        assert (answer.version, found) == (1, 0)
        assert (await turn("r-1/0", longer))[1] > 0
        assert engine.kv().prompted == len(prompt) + 4 * len(longer) and engine.kv().capacity > 0
    finally:
        vllm.shutdown()
