"""Rollout backend `vllm`: verl's vLLM server with our engine interface in it, instead of its HTTP server and its one-shot `generate`.

Weights arrive verl's own way: its adapter in the training worker has the server call vLLM's workers, and sends those the tensors. From
that call on no turn is admitted, until the trainer has had the new weights compared with its own (`admit`).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

from trainer.engine.base import KV, EngineError, Generation, GenerationRequest, OnTokens
from trainer.engine.vllm import Probe, VllmEngine

from .rollout_cpu import ReceivingWorker, sampling_of, standalone_worker

BRINGS_WEIGHTS = "update_weights_from_ipc"
"""The method of vLLM's workers that verl's adapter calls when it is about to send tensors."""
CPU_EXTENSION = "trainer.verl_plugin.vllm_worker.CpuExtension"
Part = tuple[list[int], list[float]]


class VllmServer(vLLMHttpServer):
    """Listens on no port: every call comes through its actor. Nothing of the vocabulary is masked, because the trainer masks nothing."""

    vllm: VllmEngine

    async def run_server(self, args: argparse.Namespace) -> None:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        config.parallel_config.data_parallel_master_port = self._dp_master_port
        self.engine = AsyncLLM.from_vllm_config(config)
        self.vllm = VllmEngine(self.engine)

    def get_server_address(self) -> tuple[str, int]:
        """A name that no other server on the node has, because the port is held. Nothing listens there."""
        return self._server_address, self._master_port

    @ray.method(num_returns="streaming")
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session: str,
        routes_from: int = 0,
        salt: str = "",
        **_: Any,
    ) -> AsyncIterator[Part | TokenOutput]:
        """New tokens as they come, then the turn. `routed_experts` holds the rows from `routes_from` on."""
        parts = asyncio.Queue[Part | None]()
        request = GenerationRequest(
            session, prompt_ids, sampling_of(sampling_params), routes_from, lambda *part: parts.put_nowait(part), salt
        )
        turn = asyncio.create_task(self.vllm.generate(request))
        turn.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (part := await parts.get()) is not None:
                yield part
            yield _output(await turn, self.vllm.kv())
        finally:
            turn.cancel()

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        if method == BRINGS_WEIGHTS:
            await self.vllm.pause()
        await self.vllm.living(super().collective_rpc(method, *args, **kwargs))

    async def _sleep_hybrid(self) -> None:
        """verl's hook for giving GPU memory back to training. No turn runs or is let in until `admit`. vLLM 0.31 clears its cache for that,
        and with routes it only does so under `keep`, which has nothing to keep here."""
        await self.vllm.pause()
        await self.vllm.living(self.engine.sleep(level=self._resolve_sleep_level(), mode="keep"))
        await self.engine.reset_encoder_cache()

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Every turn ends as `aborted`; later ones wait for `admit`, which also resets the cache."""
        if self.node_rank == 0:
            await self.vllm.pause()
        return {"aborted_count": 0, "request_ids": []}

    async def admit(self, probe: Probe) -> None:
        """Serve the weights that arrived. EngineError: they are not those of the trainer."""
        await self.vllm.serve(self.global_steps, probe)

    def _get_worker_extension_cls(self) -> str:
        return CPU_EXTENSION if get_platform().device_name == "cpu" else super()._get_worker_extension_cls()


def _output(turn: Generation, kv: KV) -> TokenOutput:
    return TokenOutput(
        token_ids=turn.token_ids,
        log_probs=turn.log_probs,
        routed_experts=turn.routes,
        stop_reason=turn.stop_reason,
        extra_fields={"global_steps": turn.version, "kv": kv},
    )


class ServerHandle:
    """The server's actor handle for verl's client, which awaits one answer: `generate` hands on what is streamed before it. Picklable."""

    def __init__(self, server: Any) -> None:
        self.server = server

    @property
    def generate(self) -> _Generate:
        return _Generate(self.server)


class _Generate:
    def __init__(self, server: Any) -> None:
        self.server = server

    async def remote(self, *, on_tokens: OnTokens | None = None, **asked: Any) -> TokenOutput:
        """Cancelling it aborts the turn: verl's client itself never does."""
        stream = self.server.generate.remote(**asked)
        try:
            async for reference in stream:
                part = await reference
                if isinstance(part, TokenOutput):
                    return part
                if on_tokens is not None:
                    on_tokens(*part)
        except asyncio.CancelledError:
            ray.cancel(stream)
            raise
        raise EngineError("the vLLM server ended a turn without an answer")


class VllmReplica(vLLMReplica):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(VllmServer)

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        on_cpu = get_platform().device_name == "cpu"
        return standalone_worker(self, ReceivingWorker) if on_cpu else super().get_ray_class_with_init_args()

    async def launch_servers(self) -> None:
        await super().launch_servers()
        self._server_handle = ServerHandle(self.servers[0])
