from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schemas.runspec import Cluster, Parallel, Trainer
from trainer.learning.replay import ReplayCounts
from trainer.verl_plugin.metrics import routing_metrics
from trainer.verl_plugin.ranks import spread


def cuts(order: list[int], ranks: int) -> list[list[int]]:
    """As verl's dispatch makes them."""
    base, longer = divmod(len(order), ranks)
    ends = [0]
    for rank in range(ranks):
        ends.append(ends[-1] + base + (rank < longer))
    return [order[start:end] for start, end in pairwise(ends)]


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 3)), max_size=40), st.integers(1, 5))
def test_every_row_has_one_place_and_ranks_differ_by_a_row(rows: list[tuple[int, int]], ranks: int) -> None:
    lengths, minibatches = [length for length, _ in rows], [number for _, number in rows]
    order = spread(lengths, minibatches, ranks)
    assert sorted(order) == list(range(len(rows)))
    if len(set(minibatches)) == 1:
        tokens = [sum(lengths[row] for row in cut) for cut in cuts(order, ranks)]
        assert max(tokens) - min(tokens) <= 2 * max(lengths)


def test_a_minibatch_lies_evenly_on_the_ranks() -> None:
    """Two mini-batches of four rows, each with one very long row."""
    lengths, minibatches = [900, 10, 20, 30, 800, 40, 50, 60], [0] * 4 + [1] * 4
    first, second = cuts(spread(lengths, minibatches, 2), 2)
    assert Counter(minibatches[row] for row in first) == Counter(minibatches[row] for row in second) == {0: 2, 1: 2}
    assert sorted(sum(lengths[row] for row in cut if minibatches[row] == 0) for cut in (first, second)) == [50, 910]


def test_one_rank_keeps_the_order() -> None:
    assert spread([3, 9, 1], [1, 0, 1], 1) == [0, 1, 2]


def test_routes_are_counted_over_ranks() -> None:
    """A rank that replayed three times as much counts three times as much, and one that replayed nothing does not count."""
    ranks = [ReplayCounts(300, 6, 4, 0.9, 1.0), ReplayCounts(100, 2, 0, 0.5, 0.6), ReplayCounts(0, 0, 9, math.nan, math.nan)]
    assert routing_metrics(ranks) == pytest.approx(
        {"lego/routing/replayed": 400, "lego/routing/changed": 8, "lego/routing/overlap": 0.8, "lego/routing/top1": 0.9}
    )
    assert routing_metrics(ranks[2:]) == {"lego/routing/replayed": 0, "lego/routing/changed": 0}
    assert routing_metrics([]) == {}


def test_gpus_that_share_a_copy_share_its_rows() -> None:
    cluster = Cluster(nodes=2, gpus_per_node=8, ray="auto")
    assert Trainer(cluster=cluster).copies == 16
    assert Trainer(cluster=cluster, parallel=Parallel(sequence=8, expert=4)).copies == 2
    assert Trainer(cluster=cluster, parallel=Parallel(tensor=2, pipeline=2, context=2)).copies == 2
