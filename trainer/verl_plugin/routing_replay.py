"""Routing replay for verl's FSDP2 engine on a CPU; verl 0.9.1 itself has it for Megatron and VeOmni, and no engine for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from trainer.learning.replay import RoutingReplay


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
class ReplayEngine(FSDPEngineWithLMHead):
    """Micro-batches that carry `routed_experts` (jagged [rows, tokens, layers, top_k]) run under those routes, others natively."""

    replay: RoutingReplay

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        self.replay = RoutingReplay(module)
        return module

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, outputs = super().prepare_model_inputs(micro_batch)
        routes = micro_batch.get("routed_experts", None)
        self.replay.load(None if routes is None or not self.replay.layers else self._packed(routes, micro_batch, outputs))
        return inputs, outputs

    def _packed(self, routes: torch.Tensor, micro_batch: TensorDict, outputs: dict[str, Any]) -> torch.Tensor:
        """Routes in the order of the packed tokens; padding behind them is routed natively."""
        if self.use_ulysses_sp or not tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            raise ValueError("routing replay on FSDP2 needs model.use_remove_padding and no Ulysses sequence parallelism")
        packed = routes.values()
        return torch.cat([packed, packed.new_zeros(outputs["pad_size"], *packed.shape[1:])])
