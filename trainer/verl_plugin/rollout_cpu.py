"""Rollout backend `cpu`: the CPU engine, served from inside a worker: the training one, or one of its own when training is asynchronous.

verl sees a replica whose server handle forwards to the worker's actor, and an adapter that receives the weights after each update.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from trainer.engine.base import GenerationRequest, Sampling
from trainer.engine.cpu import CpuEngine

NAME = "cpu"


class CpuServer:
    """The methods that verl calls on a rollout server."""

    def __init__(self, engine: CpuEngine) -> None:
        self.engine = engine
        self._admitting = asyncio.Event()
        self._admitting.set()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session: str,
        routes_from: int = 0,
        salt: str = "",
        released: Sequence[str] = (),
        **_: Any,
    ) -> TokenOutput:
        """`routed_experts` holds the rows from `routes_from` on, in the engine's narrow type. `released` are sessions that are over."""
        for over in released:
            self.engine.release(over)
        await self._admitting.wait()
        turn = await self.engine.generate(GenerationRequest(session, prompt_ids, sampling_of(sampling_params), routes_from, salt=salt))
        return TokenOutput(
            token_ids=turn.token_ids,
            log_probs=turn.log_probs,
            routed_experts=turn.routes,
            stop_reason=turn.stop_reason,
            extra_fields={"global_steps": turn.version, "kv": self.engine.kv()},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Until `resume_generation` new requests wait, so none begins under weights that are about to go."""
        self._admitting.clear()
        self.engine.abort_all()

    async def resume_generation(self) -> None:
        self._admitting.set()

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Memory is not shared with anything here: there is nothing to put to sleep, wake or clear."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def sampling_of(params: dict[str, Any]) -> Sampling:
    """What `VerlEngine` put into verl's free-form sampling parameters."""
    return Sampling(params["temperature"], params["max_tokens"], tuple(params["stop_token_ids"]))


class WorkerHandle:
    """Looks like a server's actor handle; every call goes to the training worker's actor. Picklable."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, method: str) -> _RemoteMethod:
        if method.startswith("_") or method == "worker":
            raise AttributeError(method)
        return _RemoteMethod(self.worker, method)


class _RemoteMethod:
    def __init__(self, worker: Any, method: str) -> None:
        self.worker, self.method = worker, method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("on_tokens", None)  # nothing is streamed: a turn of a small policy takes milliseconds
        reference = self.worker.engine_call.remote(self.method, *args, **kwargs)
        return _cancelling(reference) if self.method == "generate" else reference


async def _cancelling(reference: Any) -> Any:
    """Await a remote call, and take it back when whoever awaits it is cancelled: verl's client itself never aborts a generation."""
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise


class ReceivingWorker(CheckpointEngineWorker):
    """A worker beside an engine that only generates. Its weights come from `transport.ObjectStore`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def deliver(self, named: dict[str, torch.Tensor]) -> None:
        self.checkpoint_engine.deliver(named)


class CpuRolloutWorker(ReceivingWorker):
    """Has the engine inside."""

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def engine_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.server_adapter.server, method)(*args, **kwargs)


def standalone_worker(replica: RolloutReplica, kind: type[ReceivingWorker]) -> RayClassWithInitArgs:
    """What verl starts for a replica whose engine is apart from training."""
    return RayClassWithInitArgs(
        ray.remote(kind), rollout_config=replica.config, model_config=replica.model_config, replica_rank=replica.replica_rank
    )


class CpuReplica(RolloutReplica):
    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        return standalone_worker(self, CpuRolloutWorker)

    async def launch_servers(self) -> None:
        handle = WorkerHandle(self.workers[0])
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = f"{NAME}_{self.replica_rank}"


class CpuAdapter(base.BaseRollout):
    """Lives in the training worker and owns the engine."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.server = CpuServer(
            CpuEngine.from_checkpoint(
                Path(self.model_config.local_path),
                context=self.config.max_model_len,
                slots=self.config.max_num_seqs,
                seed=self.config.seed,
            )
        )

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]], global_steps: int = 0, **_: Any
    ) -> None:
        if isinstance(weights, AsyncIterator):
            named = {name: tensor.detach() async for name, tensor in weights}
        else:
            named = {name: tensor.detach() for name, tensor in weights}
        self.server.engine.set_weights(named, global_steps)


def register_backend() -> None:
    RolloutReplicaRegistry.register(NAME, lambda: CpuReplica)
    base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.CpuAdapter"  # the one private touch: verl 0.9.1 has no public way
