"""Experts on the CPU that take new weights.

vLLM packs the experts' weights for the CPU's kernel behind the first load only. Later ones are copied into the packed memory unpacked,
which is garbage without an error.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # type: ignore[import-not-found]
    UnquantizedFusedMoEMethod,
)


class RepackedExperts(UnquantizedFusedMoEMethod):
    def _setup_kernel(self, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        super()._setup_kernel(layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def register() -> None:
    """vLLM makes a `RepackedExperts` wherever it makes an `UnquantizedFusedMoEMethod`."""
    UnquantizedFusedMoEMethod.register_oot(RepackedExperts)
