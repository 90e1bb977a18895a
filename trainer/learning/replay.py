"""Rollout routing replay (R3): train under the experts that were chosen when the tokens were sampled.

A forward hook on each router swaps the chosen ids and takes their weights from the trainer's own logits, so that the router keeps its
gradient. A row without a recorded route holds the same expert twice (by convention all zeros, which `top_k` >= 2 makes unambiguous)
and is routed natively.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROUTERS = ("Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter")
"""Classes of transformers whose output is (logits, weights, ids), by name: nobody has to import three families for one."""


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """(token, layer) rows seen since the last `take`. `changed` of the `replayed` ones would have gone elsewhere by themselves.

    Against the trainer's own choice at that moment: `overlap` is the share of replayed experts that it holds too, `top1` the share of
    replayed rows whose first expert is its first. Both are NaN when nothing was replayed.
    """

    replayed: int
    changed: int
    native: int
    overlap: float = field(default=math.nan, compare=False)
    top1: float = field(default=math.nan, compare=False)


class RoutingReplay:
    """Hooks on every router of a HF model of Qwen3-MoE, Qwen3-Next or Qwen3.5-MoE. Without routes loaded the model runs as if they were
    not there."""

    def __init__(self, model: nn.Module) -> None:
        routers: list[Any] = [module for module in model.modules() if type(module).__name__ in ROUTERS]
        if any(router.top_k < 2 for router in routers):
            raise ValueError("routing replay needs at least two experts per token: with one, a missing row cannot be told from expert 0")
        self.layers = len(routers)
        self._top_k = routers[0].top_k if routers else 0
        self._routes: Tensor | None = None
        self._counts = torch.zeros(5, dtype=torch.long)
        self._handles = [router.register_forward_hook(self._hook(layer)) for layer, router in enumerate(routers)]

    def load(self, routes: Tensor | None) -> None:
        """Routes of the next forward passes, integer [tokens, layers, top_k] in the order of the flattened input; None: all native."""
        if routes is not None and routes.shape[1] != self.layers:
            raise ValueError(f"routes of {routes.shape[1]} layers for a model with {self.layers} routed ones")
        self._routes = None if routes is None else routes.long()

    def take(self) -> ReplayCounts:
        """Counts since the last call. A pass that is recomputed for its gradient counts again."""
        replayed, changed, native, shared, top1 = self._counts.tolist()
        self._counts.zero_()
        if not replayed:
            return ReplayCounts(0, 0, native)
        return ReplayCounts(replayed, changed, native, shared / (replayed * self._top_k), top1 / replayed)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: int) -> Any:
        def swap(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
            if self._routes is None:
                return None
            logits, scores, own = output
            recorded = self._routes[:, layer]
            if recorded.shape != own.shape:
                raise ValueError(f"routes are {tuple(recorded.shape)}, the forward pass has {tuple(own.shape)} (tokens, experts per token)")
            in_order = recorded.sort(-1).values
            native = (in_order[:, 1:] == in_order[:, :-1]).any(-1, keepdim=True)
            chosen = torch.where(native, own, recorded)
            weights = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
            if getattr(router, "norm_topk_prob", True):  # Qwen3.5 always does
                weights = weights / weights.sum(-1, keepdim=True)
            changed = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            held = (chosen.unsqueeze(-1) == own.unsqueeze(-2)).any(-1) & ~native
            first = (chosen[:, :1] == own[:, :1]) & ~native
            counts = torch.stack([(~native).sum(), changed.sum(), native.sum(), held.sum(), first.sum()])
            self._counts = self._counts.to(counts.device) + counts  # a copy to the host would wait for a GPU in every layer
            return logits, weights.to(scores.dtype), chosen

        return swap
