"""Whether two captures are one: every array by type and value, every message, every fact."""

from __future__ import annotations

import dataclasses

import numpy as np

from server.schemas.runspec import TrainRule
from trainer.capture.capture import Capture
from trainer.capture.graph import Graph, Node


def assert_same_capture(one: Capture, two: Capture) -> None:
    for field in dataclasses.fields(Capture):
        if field.name != "graph":
            assert getattr(one, field.name) == getattr(two, field.name), field.name
    ours, theirs = answered(one.graph), answered(two.graph)
    assert len(ours) == len(theirs)
    number = {id(node): i for i, node in enumerate(ours)} | {id(node): i for i, node in enumerate(theirs)}
    for a, b in zip(ours, theirs, strict=True):
        assert_same_node(a, b)
        assert (a.parent is None) == (b.parent is None)
        assert a.parent is None or b.parent is None or number[id(a.parent)] == number[id(b.parent)]
    assert [number[id(turn)] for turn in one.graph.turns] == [number[id(turn)] for turn in two.graph.turns]
    assert one.graph.roots.keys() >= two.graph.roots.keys()
    assert [(id, turn.index) for id, turn in one.graph.calls.items()] == [(id, turn.index) for id, turn in two.graph.calls.items()]
    for rule in TrainRule:
        for x, y in zip(one.samples(rule), two.samples(rule), strict=True):
            assert_same_fields(x, y)


def assert_same_node(a: Node, b: Node) -> None:
    assert type(a) is type(b) and repr(a.message) == repr(b.message) and a.message.key == b.message.key
    assert_same_fields(a, b, but=("message", "parent", "children"))


def assert_same_fields(a: object, b: object, but: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(a):  # type: ignore[arg-type]
        if field.name in but:
            continue
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), field.name
        else:
            assert x == y and type(x) is type(y), field.name


def answered(graph: Graph) -> list[Node]:
    """Nodes on the way to a turn, in the order of the graph."""
    wanted = {id(node) for turn in graph.turns for node in turn.path()}
    return [node for node in graph.nodes() if id(node) in wanted]
