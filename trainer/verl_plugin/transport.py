"""Weights from the training worker to rollout workers through Ray's object store; verl's own transports need GPUs or their network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

NAME = "object_store"


@CheckpointEngineRegistry.register(NAME)
class ObjectStore(CheckpointEngine):
    """The first training worker hands the tensors to every rollout worker, which takes them with `deliver`."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._receivers: list[Any] = []
        self._arrived: asyncio.Queue[dict[str, torch.Tensor]] = asyncio.Queue()

    def prepare(self) -> dict[str, Any]:
        return {"worker": ray.get_runtime_context().current_actor}

    @classmethod
    def build_topology(
        cls, actors: int, rollouts: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        receivers = [entry["worker"] for entry in metadata[actors:]]
        return {"receivers": [receivers] + [[]] * (actors - 1)}, {"receivers": [[]] * rollouts}

    def init_process_group(self, receivers: list[Any]) -> None:
        self._receivers = receivers

    def finalize(self) -> None:
        self._receivers = []

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict[str, float]:
        """Every worker walks through the weights, because gathering them takes all."""
        named = {name: tensor.detach().cpu() for name, tensor in weights}
        if self._receivers:
            stored = ray.put(named)
            await asyncio.gather(*(worker.deliver.remote(stored) for worker in self._receivers))
        return {}

    def deliver(self, named: dict[str, torch.Tensor]) -> None:
        self._arrived.put_nowait(named)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name, tensor in (await self._arrived.get()).items():
            yield name, tensor.clone()  # the store's memory cannot be written and is not ours to keep
