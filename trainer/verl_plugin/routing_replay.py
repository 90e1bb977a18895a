"""Routing replay for verl's FSDP2 engine; verl 0.9.1 itself has it for Megatron and VeOmni, and no engine for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from trainer.learning.replay import RoutingReplay

from .engine_cpu import SideBySideEngine, side_by_side


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cuda", vendor="nvidia")
class ReplayEngine(FSDPEngineWithLMHead):
    """Micro-batches that carry `routed_experts` (jagged [rows, tokens, layers, top_k]) run under those routes, others natively.
    Padding is routed natively too."""

    replay: RoutingReplay

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        self.replay = RoutingReplay(module)
        return module

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, outputs = super().prepare_model_inputs(micro_batch)
        routes = micro_batch.get("routed_experts", None)
        self.replay.load(None if routes is None else self.in_order_of_inputs(routes, outputs))
        return inputs, outputs

    def in_order_of_inputs(self, routes: torch.Tensor, outputs: dict[str, Any]) -> torch.Tensor:
        """[tokens, layers, top_k] of what this rank computes: the rows laid end to end, padded behind and, under sequence parallelism, cut
        into equal parts."""
        padded = nn.functional.pad(routes.values(), (0, 0, 0, 0, 0, outputs["pad_size"]))
        rank = self.ulysses_device_mesh["sp"].get_local_rank() if self.ulysses_device_mesh is not None else 0
        return padded.chunk(self.ulysses_sequence_parallel_size)[rank]


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
class CpuReplayEngine(ReplayEngine, SideBySideEngine):
    def in_order_of_inputs(self, routes: torch.Tensor, outputs: dict[str, Any]) -> torch.Tensor:
        return side_by_side(routes).flatten(0, 1)
