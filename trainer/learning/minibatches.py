"""Partition of a step's rollouts into a fixed number of mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def partition(tokens: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """Rollout indices of each of `count` mini-batches; `tokens[i]` is the number of trained tokens of rollout i, all its branches together.

    A rollout is one item, so its branches stay together. Rollouts are drawn in an order that only `seed` decides and each goes to the
    mini-batch with the fewest trained tokens so far: loads differ by at most the largest rollout. With fewer rollouts than
    mini-batches the last lists are empty; with at least as many, none is.
    """
    if count < 1:
        raise ValueError(f"the number of mini-batches must be positive, got {count}")
    if any(number < 1 for number in tokens):
        raise ValueError("every rollout needs a trained token")
    batches: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in np.random.default_rng(seed).permutation(len(tokens)).tolist():
        lightest = loads.index(min(loads))
        batches[lightest].append(index)
        loads[lightest] += tokens[index]
    return batches
