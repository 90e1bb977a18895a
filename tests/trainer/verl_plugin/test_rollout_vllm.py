"""Our vLLM server in a Ray actor, through the handle that verl's client gets (`make test-vllm`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.support.vllm import PROMPT, SETTINGS, check, probe, save, save_experts, start
from trainer.engine.base import EngineError, Generation
from trainer.engine.vllm_cpu import ROUTES

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")
pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def ray_session() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False, runtime_env={"env_vars": SETTINGS})
    yield ray
    ray.shutdown()


def asked(tokens: int, temperature: float = 1.0) -> dict[str, Any]:
    sampling = {"temperature": temperature, "max_tokens": tokens, "stop_token_ids": []}
    return {"request_id": "r", "prompt_ids": PROMPT, "sampling_params": sampling, "session": "s"}


def generation(output: Any) -> Generation:
    return Generation(output.token_ids, output.log_probs, None, output.stop_reason, output.extra_fields["global_steps"])


def server_class() -> Any:
    from verl.workers.rollout.replica import RolloutMode

    from trainer.engine.vllm import VllmEngine
    from trainer.verl_plugin.rollout_vllm import VllmServer

    class Server(VllmServer):
        """With as much of verl's configuration as its own methods look at, and weights from a directory in place of a training worker's."""

        def __init__(self) -> None:
            self.node_rank = self.global_steps = 0
            self.rollout_mode = RolloutMode.HYBRID
            self.config = SimpleNamespace(free_cache_engine=True)
            self.model_config = SimpleNamespace(lora_rank=0, lora={})

        async def launch(self, path: Path, **arguments: Any) -> None:
            self.engine = start(path, **arguments)
            self.vllm = VllmEngine(self.engine)

        async def running(self) -> int:
            return len(self.vllm._running)

        async def load(self, path: str) -> None:
            await self.vllm.pause()
            await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": path})

        async def paused(self) -> bool:
            return bool(await self.engine.is_paused())

        async def close(self) -> None:
            self.engine.shutdown()

    return Server


async def test_it_streams_is_taken_back_and_serves_no_weights_unseen(ray_session: Any, tmp_path: Path) -> None:
    from trainer.verl_plugin.rollout_vllm import ServerHandle

    old, new = save(tmp_path / "old", 0), save(tmp_path / "new", 1)
    server = ray_session.remote(server_class()).remote()
    await server.launch.remote(old)
    handle, parts, begun = ServerHandle(server), list[list[int]](), asyncio.Event()
    try:
        answer = await handle.generate.remote(**asked(16, 0.7), on_tokens=lambda ids, _: parts.append(ids))
        assert len(parts) > 1 and [token for part in parts for token in part] == answer.token_ids
        assert (answer.stop_reason, answer.extra_fields["global_steps"]) == ("length", 0)
        check(old, generation(answer), 0.7)

        call = asyncio.create_task(handle.generate.remote(**asked(1900), on_tokens=lambda *_: begun.set()))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while await server.running.remote():
            pass

        begun.clear()
        call = asyncio.create_task(handle.generate.remote(**asked(1900), on_tokens=lambda *_: begun.set()))
        await begun.wait()
        await server.abort_all_requests.remote()
        partial = generation(await call)
        assert partial.stop_reason == "aborted" and partial.token_ids and partial.version == 0
        check(old, partial, 1.0)

        waiting = asyncio.create_task(handle.generate.remote(**asked(16, 0.7)))
        await server.load.remote(str(new))
        await server.set_global_steps.remote(1)
        assert not waiting.done()
        await server.admit.remote(probe(new))
        later = generation(await waiting)
        assert later.version == 1
        check(new, later, 0.7)

        await server.load.remote(str(old))
        with pytest.raises(EngineError, match="does not compute with the weights of version 1"):
            await server.admit.remote(probe(new))
        with pytest.raises(EngineError, match="exceed the context"):
            await handle.generate.remote(**asked(4000))
    finally:
        await server.close.remote()


async def test_it_sleeps_while_training_has_the_gpu_and_wakes_under_new_weights(ray_session: Any, tmp_path: Path) -> None:
    """In the order in which verl's synchronous trainer calls it, with routes on. A CPU gives no memory back, which is what is not seen."""
    from trainer.verl_plugin.rollout_vllm import ServerHandle

    old, new = save_experts(tmp_path / "old", 0), save_experts(tmp_path / "new", 1)
    server = ray_session.remote(server_class()).remote()
    await server.launch.remote(old, **ROUTES)
    handle, begun = ServerHandle(server), asyncio.Event()
    try:
        running = asyncio.create_task(handle.generate.remote(**asked(1900), on_tokens=lambda *_: begun.set()))
        await begun.wait()
        await server.sleep.remote()
        assert (await running).stop_reason == "aborted" and await server.paused.remote()
        waiting = asyncio.create_task(handle.generate.remote(**asked(16, 0.7)))
        await server.wake_up.remote(["weights"])
        await server.load.remote(str(new))
        await server.clear_kv_cache.remote()
        await server.set_global_steps.remote(1)
        assert await server.paused.remote()
        await server.wake_up.remote(["kv_cache"])
        assert not waiting.done()
        await server.admit.remote(probe(new))
        later = await waiting
        assert later.extra_fields["global_steps"] == 1 and later.routed_experts.shape == (len(PROMPT) + 15, 3, 2)
        check(new, generation(later), 0.7)
    finally:
        await server.close.remote()
