"""Forward pass of Qwen3 and Qwen3-MoE over a slot cache, in plain torch operations, fp32.

Equal to transformers' modules up to rounding (tests compare log-probs and routes). Tokens of all rows are one flat batch; only attention
pads, because rows have different lengths there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import Slots
from .weights import Experts, Mlp, Shape, Weights, pack

_DENSE_ROWS = 128
"""Up to this many tokens all experts are computed as one wide MLP; beyond it sorting tokens by expert is faster (16 experts, top 4)."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the flat tokens [N] of B rows lie. `row`/`column` place them in a padded [B, T] array; None when every row has one token."""

    slots: Tensor  # [B]
    cells: Tensor  # [N] index into [slots * context]
    bias: Tensor  # [B, 1, groups * T, length], 0 or -inf
    length: int
    cos: Tensor  # [N, 1, head_dim]
    sin: Tensor  # [N, 1, head_dim], first half negated
    row: Tensor | None
    column: Tensor | None
    last: Tensor  # [B] flat index of each row's last token


class Policy:
    """Weights plus the forward pass over them. `load` swaps the weights."""

    def __init__(self, shape: Shape, named: Mapping[str, Tensor], context: int) -> None:
        self.shape = shape
        self.weights: Weights = pack(shape, named)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(context, dtype=torch.float32)[:, None] / shape.rope_theta**half
        self._cos = angles.cos().repeat(1, 2)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1)

    def load(self, named: Mapping[str, Tensor]) -> None:
        self.weights = pack(self.shape, named)

    @torch.inference_mode()
    def extend(self, cache: Slots, slots: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        """Append `new[b]` (not empty) behind what slot `slots[b]` holds; logits [B, vocab] behind each row's last token.

        Keys, values and routes are written to the cache and `cache.tokens` grows.
        """
        at = self._layout(cache, slots, new)
        ids = torch.tensor([token for tokens in new for token in tokens])
        x = self.weights.embed[ids]
        routes = []
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attend(index, F.rms_norm(x, x.shape[-1:], layer.input_norm, self.shape.eps), cache, at)
            h = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, self.shape.eps)
            if isinstance(layer.mlp, Mlp):
                if index == self.shape.layers - 1:
                    x, h = x[at.last], h[at.last]
                gate, up = F.linear(h, layer.mlp.gate_up).chunk(2, -1)
                x = x + F.linear(F.silu(gate) * up, layer.mlp.down)
            else:
                weights, experts = self._route(h, layer.mlp)
                routes.append(experts)
                if index == self.shape.layers - 1:  # behind the last attention only the last tokens matter
                    x, h, weights, experts = (part[at.last] for part in (x, h, weights, experts))
                x = x + (_wide if len(h) <= _DENSE_ROWS else _sorted)(h, weights, experts, layer.mlp)
        if cache.routes is not None:
            cells = cache.routes.reshape(-1, *cache.routes.shape[2:])  # a view: the array is contiguous
            cells[at.cells.numpy()] = torch.stack(routes, 1).numpy()
        for slot, tokens in zip(slots, new, strict=True):
            cache.tokens[slot].extend(tokens)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.weights.norm, self.shape.eps), self.weights.head)

    def _layout(self, cache: Slots, slots: Sequence[int], new: Sequence[Sequence[int]]) -> _Layout:
        starts = [len(cache.tokens[slot]) for slot in slots]
        counts = [len(tokens) for tokens in new]
        width, length = max(counts), max(s + c for s, c in zip(starts, counts, strict=True))
        slot_ids, first = torch.tensor(slots), torch.tensor(starts)
        row = column = None
        if width == 1:
            positions, cells, last = first, slot_ids * cache.context + first, torch.arange(len(slots))
        else:
            number = torch.tensor(counts)
            last = number.cumsum(0) - 1
            row = torch.repeat_interleave(number)
            column = torch.arange(len(row)) - (last - number + 1)[row]
            positions = first[row] + column
            cells = slot_ids[row] * cache.context + positions
        reach = first[:, None] + torch.arange(width)  # [B, T]: the last position each query sees
        hidden = torch.arange(length) > reach[..., None]
        groups = self.shape.heads // self.shape.kv_heads
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).repeat(1, groups, 1)[:, None]
        return _Layout(slot_ids, cells, bias, length, self._cos[positions][:, None], self._sin[positions][:, None], row, column, last)

    def _attend(self, index: int, h: Tensor, cache: Slots, at: _Layout) -> Tensor:
        shape, layer = self.shape, self.weights.layers[index]
        heads, kv, width = shape.heads, shape.kv_heads, shape.head_dim
        rows, groups = len(at.slots), heads // kv
        qkv = F.linear(h, layer.qkv).view(len(h), heads + 2 * kv, width)
        qk = F.rms_norm(qkv[:, : heads + kv], (width,), None, shape.eps) * layer.qk_norm
        qk = torch.addcmul(qk * at.cos, qk.roll(width // 2, -1), at.sin)
        cache.keys[index].view(-1, kv, width).index_copy_(0, at.cells, qk[:, heads:])
        cache.values[index].view(-1, kv, width).index_copy_(0, at.cells, qkv[:, heads + kv :])
        keys = cache.keys[index][:, : at.length].index_select(0, at.slots).transpose(1, 2)
        values = cache.values[index][:, : at.length].index_select(0, at.slots).transpose(1, 2)
        # Query heads that share a key head become further queries of it, so keys are never repeated.
        q = qk[:, :heads]
        if at.row is None:
            out = F.scaled_dot_product_attention(q.reshape(rows, kv, groups, width), keys, values, attn_mask=at.bias).reshape(rows, -1)
        else:
            padded = q.new_zeros(rows, at.bias.shape[2] // groups, heads, width)
            padded[at.row, at.column] = q
            queries = padded.view(rows, -1, kv, groups, width).permute(0, 2, 3, 1, 4).reshape(rows, kv, -1, width)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=at.bias)
            out = out.view(rows, heads, -1, width).transpose(1, 2)[at.row, at.column].view(len(h), -1)
        return F.linear(out, layer.out)

    def _route(self, h: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        """(weights, expert ids), both [N, top_k]."""
        weights, ids = F.linear(h, experts.router).softmax(-1).topk(self.shape.top_k, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.shape.normalise_top_k else weights), ids


def _wide(h: Tensor, weights: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """All experts as one MLP of width E ff; an expert that was not chosen has weight 0."""
    per_expert = h.new_zeros(len(h), len(experts.router), 1).scatter_(1, ids[..., None], weights[..., None])
    gate, up = F.linear(h, experts.all_gate_up).chunk(2, -1)
    inner = F.silu(gate).mul_(up).view(len(h), len(experts.router), -1).mul_(per_expert)
    return F.linear(inner.view(len(h), -1), experts.all_down)


def _sorted(h: Tensor, weights: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """Tokens grouped by expert, one pair of products per expert."""
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    token = order // ids.shape[1]
    inputs = h[token]
    outputs = torch.empty_like(inputs)
    start = 0
    for expert, number in enumerate(torch.bincount(chosen, minlength=len(experts.router)).tolist()):
        if number:
            end = start + number
            gate, up = F.linear(inputs[start:end], experts.gate_up[expert]).chunk(2, -1)
            torch.mm(F.silu(gate).mul_(up), experts.down[expert].T, out=outputs[start:end])
            start = end
    outputs *= weights.flatten()[order][:, None]
    return torch.zeros_like(h).index_add_(0, token, outputs)
