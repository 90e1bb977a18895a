"""A client that goes away takes its generation with it, across Ray (user-pain 25)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trainer.models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def ray_session() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


async def test_cancelling_aborts_in_the_worker(ray_session: Any) -> None:
    from trainer.engine.cpu import CpuEngine
    from trainer.engine.weights import Shape
    from trainer.verl_plugin.rollout_cpu import CpuServer, WorkerHandle

    model = make_model(moe=False)
    shape, weights = Shape.from_hf(model.config.to_dict()), model.state_dict()

    class Worker:
        def __init__(self) -> None:
            self.server = CpuServer(CpuEngine(shape, weights, context=512))

        async def engine_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.server, method)(*args, **kwargs)

        async def load(self) -> tuple[int, int, int]:
            return self.server.engine.load

    worker = ray_session.remote(Worker).remote()
    handle = WorkerHandle(worker)
    sampling = {"temperature": 1.0, "max_tokens": 500, "stop_token_ids": []}
    call = asyncio.create_task(handle.generate.remote("a", prompt_ids=[1, 2], sampling_params=sampling, session="s"))
    async with asyncio.timeout(60):
        while (await worker.load.remote())[0] == 0:
            assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while await worker.load.remote() != (0, 0, 1):
            pass
    sampling["max_tokens"] = 3
    answer = await handle.generate.remote("b", prompt_ids=[1, 2], sampling_params=sampling, session="t", released=["s"])
    assert len(answer.token_ids) == 3 and answer.extra_fields["kv"].held == {"t": 1}
