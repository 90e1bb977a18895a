"""A step that trains its batch in parts: what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.learning.replay import ReplayCounts
from trainer.rollout.manager import Batch
from trainer.rollout.rows import Rows

from .metrics import LogProbs
from .update import RowOwners


class Compared(NamedTuple):
    """Log-probs of a part's rows, whose they are, what was replayed when they were scored (on each rank that counts), and the rows' mean
    entropy."""

    columns: LogProbs
    owners: RowOwners
    replayed: list[ReplayCounts]
    entropy: float


@dataclass(slots=True)
class StepSoFar:
    """`scored` has an entry for each part with rows, `updates` the metrics of every pass with gradients."""

    parts: list[Batch] = field(default_factory=list)
    scored: list[Compared] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.parts) and self.parts[-1].complete

    def whole(self) -> Batch:
        """All parts as if they had been one."""
        rows = Rows([key for part in self.parts for key in part.rows.keys], [tag for part in self.parts for tag in part.rows.tags])
        return Batch([group for part in self.parts for group in part.played], rows, self.parts[-1].stale)


def together(parts: Sequence[Compared]) -> Compared:
    """The rows of all parts as if they were one batch. `parts` is not empty; rollouts are numbered through."""
    columns, owners, replayed, entropies = zip(*parts, strict=True)

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in columns])

    lengths = np.concatenate([np.diff(part.offsets) for part in columns])
    offsets, present = np.concatenate([[0], np.cumsum(lengths)]), columns[0].present
    sampler = None if columns[0].sampler is None else joined("sampler")
    whole = LogProbs(joined("rollout"), joined("trainer"), joined("mask"), offsets, joined("versions"), present, sampler)
    numbers = accumulate((1 + max(part.rollouts) for part in owners), initial=0)
    rollouts = [start + number for part, start in zip(owners, numbers, strict=False) for number in part.rollouts]
    harnesses = list(chain.from_iterable(part.harnesses for part in owners))
    entropy = float(np.average(entropies, weights=[len(part.harnesses) for part in owners]))
    return Compared(whole, RowOwners(harnesses, rollouts, whole.versions), list(chain.from_iterable(replayed)), entropy)


def verls_own(compared: Compared) -> dict[str, float]:
    """What verl measures of a batch that it scores, and of each part by itself: of all of them."""
    mask = compared.columns.mask.astype(bool)
    differences = np.abs(np.exp(compared.columns.trainer[mask]) - np.exp(compared.columns.rollout[mask]))
    found = {"max": np.max(differences), "mean": np.mean(differences), "std": np.std(differences, ddof=1)}
    return {"actor/entropy": compared.entropy} | {f"training/rollout_probs_diff_{name}": float(value) for name, value in found.items()}


def one_update(parts: Sequence[dict[str, float]], grad_norm: float) -> dict[str, float]:
    """Metrics of the optimizer step that the passes over all parts led to."""
    return {name: sum(part[name] for part in parts) for name in parts[0]} | {"grad_norm": grad_norm}
