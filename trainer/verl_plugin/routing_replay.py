"""Routing replay for verl's FSDP2 engine on a CPU; verl 0.9.1 itself has it for Megatron and VeOmni, and no engine for a CPU."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import nn
from verl.workers.engine import EngineRegistry

from trainer.learning.replay import RoutingReplay

from .engine_cpu import SideBySideEngine, side_by_side


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
class ReplayEngine(SideBySideEngine):
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
        self.replay.load(None if routes is None else side_by_side(routes).flatten(0, 1))
        return inputs, outputs
