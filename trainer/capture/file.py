"""A capture to the bytes of its file and back, bit for bit. `server.schemas.capturefile` says what is in it."""

from __future__ import annotations

import inspect
import io
import json
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from pydantic import BaseModel

from server.schemas.capturefile import (
    IDS,
    LOG_PROBS,
    ROUTED,
    ROUTES,
    BranchEntry,
    CallEntry,
    CaptureFile,
    CaptureFileError,
    Members,
    NodeEntry,
    RoutesEntry,
    TurnEntry,
    npy_header,
    opened,
    pack,
)
from server.schemas.runspec import TrainRule
from trainer.capture.graph import Graph, Node, Turn
from trainer.capture.message import Message, ToolCall
from trainer.capture.samples import Branch

if TYPE_CHECKING:
    from trainer.capture.capture import Capture


def to_bytes(capture: Capture, trial_id: str, rule: TrainRule) -> bytes:
    """The capture file, with the branches as `rule` has them.

    Raises ValueError when an array is not what the invariants of the graph say: what no reader takes is not written.
    """
    nodes = _answered(capture.graph)
    numbers = {id(node): i for i, node in enumerate(nodes)}
    roots = {id(node): key for key, node in capture.graph.roots.items()}
    routes = next((node.routes for node in nodes if node.routes is not None), None)
    form = None if routes is None else {"dtype": routes.dtype.str, "layers": routes.shape[1], "top_k": routes.shape[2]}
    graph = CaptureFile(
        format="lego-rl capture 1",
        trial_id=trial_id,
        routes=None if form is None else RoutesEntry.model_validate(form),
        rule=rule,
        branches=[_branch(branch) for branch in capture.branches(rule)],
        nodes=[_entry(node, numbers, roots) for node in nodes],
        **_facts(capture, CaptureFile) | {"unknown_fields": sorted(capture.unknown_fields)},
    )
    log_probs = [node.log_probs for node in nodes if isinstance(node, Turn)]
    for turn, values in zip((node for node in nodes if isinstance(node, Turn)), log_probs, strict=True):
        if len(values) != len(turn.sampled) or not np.isfinite(values).all():
            raise ValueError(f"turn {turn.index} has {len(turn.sampled)} sampled tokens and {np.isfinite(values).sum()} finite log-probs")
    arrays = {
        IDS: _npy(np.concatenate([np.zeros(0, np.int32), *(node.ids for node in nodes)])),
        LOG_PROBS: _npy(np.concatenate([np.zeros(0, np.float32), *log_probs])),
    }
    if routes is not None:
        arrays[ROUTED] = _npy(np.packbits(np.concatenate([node.routed for node in nodes])))
        arrays[ROUTES] = _npy(np.concatenate([node.routes[node.routed] for node in nodes if node.routes is not None]))
    return pack(graph, arrays)


def from_bytes(data: bytes) -> tuple[Capture, str]:
    """See `read`."""
    return read(io.BytesIO(data))


def read(file: BinaryIO) -> tuple[Capture, str]:
    """The capture and its trial's id. Raises CaptureFileError for a file that is cut, changed, or none."""
    from trainer.capture.capture import Capture

    with opened(file) as members:
        stored, nodes, graph = members.graph, _nodes(members), Graph()
        graph.turns = sorted((node for node in nodes if isinstance(node, Turn)), key=lambda turn: turn.index)
        if [turn.index for turn in graph.turns] != list(range(len(graph.turns))):
            raise CaptureFileError("the turns are not numbered from 0 without gaps")
        graph.calls = {call.id: turn for turn in graph.turns for call in turn.message.tool_calls}
        for node, entry in zip(nodes, stored.nodes, strict=True):
            if node.parent is None and graph.roots.setdefault(entry.tools, node) is not node:
                raise CaptureFileError("two roots have the same tools")
        if stored.routes is not None:
            _fill_routes(members, nodes, stored.routes)
    facts = _facts(stored, Capture) | {"unknown_fields": set(stored.unknown_fields)}
    return Capture(graph=graph, **facts), stored.trial_id


def _answered(graph: Graph) -> list[Node]:
    """Nodes on the way to a turn, parents first, siblings in the order of the graph."""
    wanted = set[int]()
    for turn in graph.turns:
        node: Node | None = turn
        while node is not None and id(node) not in wanted:
            wanted.add(id(node))
            node = node.parent
    found, stack = [], list(reversed(graph.roots.values()))
    while stack:
        next_one = stack.pop()
        if id(next_one) in wanted:
            found.append(next_one)
            stack.extend(reversed([child for siblings in next_one.children.values() for child in siblings]))
    return found


def _entry(node: Node, numbers: dict[int, int], roots: dict[int, bytes]) -> NodeEntry:
    message = node.message
    return NodeEntry(
        parent=None if node.parent is None else numbers[id(node.parent)],
        tokens=len(node.ids),
        role=message.role,
        content=message.content,
        tool_calls=[CallEntry(id=call.id, name=call.name, arguments=json.dumps(call.arguments)) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
        tools=roots.get(id(node), b""),
        turn=TurnEntry(**_facts(node, TurnEntry)) if isinstance(node, Turn) else None,
    )


def _branch(branch: Branch) -> BranchEntry:
    turns = [turn.index for turn in branch.owned]
    return BranchEntry(reason=branch.reason, branch_class=branch.branch_class, excluded=branch.excluded, turns=turns)


def _facts(one: object, other: type) -> dict[str, Any]:
    """The values that the two classes, one of the graph and one of the file, have under the same name."""
    return {name: getattr(one, name) for name in _names(type(one)) & _names(other)}


def _names(kind: type) -> set[str]:
    return set(kind.model_fields if issubclass(kind, BaseModel) else inspect.get_annotations(kind))


def _nodes(members: Members) -> list[Node]:
    entries = members.graph.nodes
    ids = np.frombuffer(members.array(IDS, "<i4", (members.tokens,)), np.int32)
    sampled = sum(entry.tokens - entry.turn.scaffold for entry in entries if entry.turn)
    log_probs = np.frombuffer(members.array(LOG_PROBS, "<f4", (sampled,)), np.float32)
    if not np.isfinite(log_probs).all():
        raise CaptureFileError(f"{LOG_PROBS} holds values that are no log-probabilities")
    nodes: list[Node] = []
    at = behind = 0
    for number, entry in enumerate(entries):
        if entry.parent is not None and entry.parent >= number:
            raise CaptureFileError(f"node {number} comes before its parent")
        parent = None if entry.parent is None else nodes[entry.parent]
        own = ids[at : at + entry.tokens].copy()
        at += entry.tokens
        if entry.turn is None:
            nodes.append(Node(_message(entry), parent, own))
            continue
        count = entry.tokens - entry.turn.scaffold
        nodes.append(_sampled(entry, entry.turn, parent, own, log_probs[behind : behind + count].copy()))
        behind += count
    return nodes


def _message(entry: NodeEntry) -> Message:
    try:
        calls = tuple(ToolCall(call.id, call.name, json.loads(call.arguments)) for call in entry.tool_calls)
    except (ValueError, RecursionError) as error:
        raise CaptureFileError(f"the arguments of a tool call are no JSON: {error}") from None
    return Message(entry.role, entry.content, calls, entry.tool_call_id, entry.reasoning)


def _sampled(entry: NodeEntry, turn: TurnEntry, parent: Node | None, ids: np.ndarray, log_probs: np.ndarray) -> Turn:
    offsets = [offset for offset, _ in turn.spans]
    if turn.scaffold >= len(ids) or offsets[0] != 0 or offsets != sorted(set(offsets)) or offsets[-1] >= len(log_probs):
        raise CaptureFileError(f"turn {turn.index}: scaffold {turn.scaffold} and spans {turn.spans} do not fit its {len(ids)} tokens")
    return Turn(_message(entry), parent, ids, log_probs=log_probs, **_facts(turn, Turn) | {"spans": list(turn.spans)})


def _fill_routes(members: Members, nodes: list[Node], shape: RoutesEntry) -> None:
    bits = np.frombuffer(members.array(ROUTED, "|u1", (-(-members.tokens // 8),)), np.uint8)
    routed = np.unpackbits(bits, count=members.tokens).astype(bool)
    expected = (int(routed.sum()), shape.layers, shape.top_k)
    rows = np.frombuffer(members.array(ROUTES, shape.dtype, expected), shape.dtype).reshape(expected)
    at = row = 0
    for node in nodes:
        node.routed = routed[at : at + len(node.ids)].copy()
        at += len(node.ids)
        if count := int(node.routed.sum()):
            node.routes = np.zeros((len(node.ids), shape.layers, shape.top_k), shape.dtype)
            node.routes[node.routed] = rows[row : row + count]
            row += count


def _npy(array: np.ndarray) -> bytes:
    return npy_header(array.dtype.str, array.shape) + array.tobytes()
