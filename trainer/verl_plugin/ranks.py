"""A batch over the ranks of a training worker.

A pass of a sharded model is a collective: every rank makes the same number of them, or all wait for ever. verl brings the ranks to one
number of micro-batches, which it can when they have the same number of rows; the dispatch does not see to that, and a mini-batch may have
no row at all on one of them. Missing rows are made up for by spare ones, two tokens long, that train nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu

NOTHING = ("response_mask", "loss_mask", "weight", "share", "kl_weight", "routed_experts")
"""Columns that are zero in a spare row: it has no trained token, no part in any sum, and is routed natively."""


class Part:
    """The rows of a batch that lie on this rank, and what the batch says of all rows. May be empty, as long as rank 0's is not.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, data: TensorDict) -> None:
        self._data = data

    def take(self, numbers: Sequence[int], multiple: int = 1) -> TensorDict | None:
        """Those rows, with spare ones behind them: as many on every rank, a multiple of `multiple`. None when no rank takes any."""
        most = torch.tensor(len(numbers))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        size = -(-int(most) // multiple) * multiple
        return tu.index_select_tensor_dict(self._and_spare, [*numbers, *[len(self._data)] * (size - len(numbers))]) if size else None

    @cached_property
    def _and_spare(self) -> TensorDict:
        """The rows and a spare one behind them."""
        spare = _from_first_rank(_spare(self._data) if len(self._data) else {})
        columns = {name: _appended(self._data, name, row) for name, row in spare.items()}
        whole = TensorDict(columns, batch_size=len(self._data) + 1)
        for name, value in self._data.items():
            if isinstance(value, NonTensorData):
                whole[name] = NonTensorData(value.data)
        return whole


def gathered(mine: Any) -> list[Any]:
    """What every rank passes, in the order of the ranks. Small things only."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


def spread(lengths: Sequence[int], minibatches: Sequence[int], ranks: int) -> list[int]:
    """An order of the rows in which verl's equal cuts give every rank about as much of each mini-batch.

    `lengths` and `minibatches` (numbers) are per row. verl gives rank r the r-th cut; cuts differ by one row at most, the first ones being
    the longer. Rows go, mini-batch by mini-batch and the longest first, to the rank with the fewest of them so far, and among those to the
    one with the fewest tokens.
    """
    if ranks == 1:
        return list(range(len(lengths)))
    base, longer = divmod(len(lengths), ranks)
    free = [base + (rank < longer) for rank in range(ranks)]
    places: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(set(minibatches)):
        rows, tokens = [0] * ranks, [0] * ranks
        members = [row for row, of in enumerate(minibatches) if of == number]
        for row in sorted(members, key=lambda row: -lengths[row]):
            rank = min((r for r in range(ranks) if free[r]), key=lambda r: (rows[r], tokens[r]))
            places[rank].append(row)
            rows[rank], tokens[rank], free[rank] = rows[rank] + 1, tokens[rank] + lengths[row], free[rank] - 1
    return [row for place in places for row in place]


def _spare(data: TensorDict) -> dict[str, torch.Tensor]:
    """The beginning of the first row. What runs along all tokens keeps two of them, what runs along prompt or response one."""
    length = len(data["input_ids"][0])
    spare = dict[str, torch.Tensor]()
    for name, column in data.items():
        if isinstance(column, torch.Tensor):
            row = column[0]
            cut = row[: 2 if len(row) == length else 1] if column.is_nested else row
            spare[name] = torch.zeros_like(cut) if name in NOTHING else cut.clone()
    return spare


def _from_first_rank(spare: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    box = [spare]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _appended(data: TensorDict, name: str, row: torch.Tensor) -> torch.Tensor:
    column = data.get(name, None)
    if column is None:
        return torch.nested.as_nested_tensor([row], layout=torch.jagged) if row.dim() else row[None]
    if column.is_nested:
        return torch.nested.as_nested_tensor([*column.unbind(), row], layout=torch.jagged)
    return torch.cat([column, row[None]])
