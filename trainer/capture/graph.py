"""The capture of one rollout: a graph of messages whose nodes own tokens.

Invariant: concatenating `ids` from a root to a turn gives exactly the prompt ids and the sampled ids of that turn's model call. A node
owns only the tokens it added, so a history shared by many calls is stored once, and a token has one mask, one log-probability, one row
of expert routes and one policy version, whatever the number of branches that run through it.

A node stands for one message. Children are found by message key, then told apart by token identity: the same message may render
differently (a tool result alone, or followed by another one in the same block). Different tool lists start different roots, because
the tools are rendered in front of everything.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from server.schemas.capture import BranchClass, Drift
from trainer.capture.drift import drift
from trainer.capture.message import Message
from trainer.capture.request import Request
from trainer.engine.base import Generation, StopReason

ROOT = Message("system", "")


@dataclass(eq=False, slots=True)
class Node:
    """A message in its context. `routes` is [len(ids), layers, top_k] once any row is known; `routed` says which rows are."""

    message: Message
    parent: Node | None
    """None for a root, which owns no token."""
    ids: np.ndarray
    routed: np.ndarray = field(init=False)
    routes: np.ndarray | None = None
    children: dict[bytes, list[Node]] = field(default_factory=dict)
    """By the digest of their message's key."""
    start: int = field(init=False)
    """Absolute position of the first id."""

    def __post_init__(self) -> None:
        self.start = 0 if self.parent is None else self.parent.end
        self.routed = np.zeros(len(self.ids), bool)
        if self.parent is not None:
            self.parent.children.setdefault(self.message.digest, []).append(self)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def path(self) -> list[Node]:
        """Nodes from the root to this one."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def turns(self) -> list[Turn]:
        """Turns on the path, this one included."""
        return [node for node in self.path() if isinstance(node, Turn)]


@dataclass(eq=False, slots=True)
class Turn(Node):
    """A sampled assistant message: `scaffold` ids of generation prompt that the proxy sent, then the sampled ids."""

    index: int = 0
    """Order of completion within the rollout."""
    call: bytes = b""
    """Digest of thread, tools and messages of the request. Of turns with the same one the client can have kept only one."""
    thread: str = ""
    tools: bytes = b""
    scaffold: int = 0
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(offset in `sampled`, policy version), ascending, the first at 0: a turn that was resumed after a weight update has several."""
    stop: StopReason = "stop"
    malformed: int = 0
    prompt_tokens: int = 0
    side: BranchClass | None = None
    """What the request alone says: a side call of this class (`Request.kind_hint`)."""
    drift: Drift | None = None
    """How the arguments of the calls were different when the turn first came back."""
    sent: bool = False
    """The whole answer was written to a client that was there."""
    returned: bool = False
    """A later request holds this turn: delivery is proven."""
    started: float | None = None
    """When the engine was asked, Unix seconds; `finished` when it had answered. None in a capture that nobody timed."""
    finished: float | None = None

    @property
    def sampled(self) -> np.ndarray:
        return self.ids[self.scaffold :]

    def versions(self) -> np.ndarray:
        """int32 [len(sampled)]: the policy version of every sampled token."""
        offsets, versions = zip(*self.spans, strict=True)
        return np.repeat(np.array(versions, np.int32), np.diff([*offsets, len(self.sampled)]))


@dataclass(frozen=True, slots=True)
class Match:
    """The longest path of nodes equal to a request's messages: `turn` is the last turn on it and ends message `position` - 1.

    Up to `seen`, which ends message `seen_position` - 1, an earlier request had the same messages.
    """

    turn: Turn | None
    position: int
    seen: Turn | None = None
    seen_position: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model call hangs: behind `node`, with `scaffold` ids of generation prompt."""

    node: Node
    scaffold: list[int]

    @property
    def end(self) -> int:
        return self.node.end + len(self.scaffold)

    def routes_from(self) -> int:
        """First position without a row of routes: the last sampled token of the turn before, unless an earlier row is missing."""
        for node in self.node.path():
            if not node.routed.all():
                return node.start + int(np.argmin(node.routed))
        return self.node.end


class Graph:
    """Grows by `place` (what a request adds) and `add_turn` (what the engine sampled). What leads to a turn is never removed or changed."""

    def __init__(self) -> None:
        self.roots: dict[bytes, Node] = {}
        self.turns: list[Turn] = []
        self.calls: dict[str, Turn] = {}
        """Tool-call id → the turn that it was minted for."""
        self._trails: dict[tuple[str, bytes], tuple[tuple[Message, ...], Turn]] = {}
        """The path that was found last in each thread, as its messages and the turn at its end: most requests go on from there."""
        self._twins = False
        """There are siblings with equal messages, so that a path is more than its messages."""
        self._read: tuple[Node | None, np.ndarray] = None, np.zeros(0, np.int32)
        """A node and all ids up to its end."""

    def nodes(self) -> Iterator[Node]:
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(child for siblings in node.children.values() for child in siblings)

    def locate(self, request: Request) -> Match:
        """Follow the messages from the root of the request's tools.

        Of several turns at one depth (equal texts) the newest of the request's thread wins.
        """
        thread = request.thread, request.tools_key
        known, seen = self._trails.get(thread, ((), None))
        if seen is not None and request.messages[: len(known)] == known:
            turns, frontier, start = [seen], list[Node]([seen]), len(known)
        else:
            root, seen = self.roots.get(request.tools_key), None
            turns, frontier, start = [], [root] if root else [], 0
        position = start
        for i, message in enumerate(request.messages[start:], start=start + 1):
            frontier = [child for node in frontier for child in node.children.get(message.digest, ()) if self._is(child, message)]
            if not frontier:
                break
            if message.role == "assistant" and (here := [node for node in frontier if isinstance(node, Turn)]):
                turns, position = here, i
        best = max(turns, key=lambda turn: (turn.thread == request.thread, turn.index), default=None)
        if best is not None and not self._twins:
            self._trails[thread] = request.messages[:position], best
        return Match(best, position, seen, start)

    def _is(self, node: Node, message: Message) -> bool:
        """Ids name a turn only where they were minted here; what the client made up itself has to be the same in every word."""
        minted = isinstance(node, Turn) or all(call.id in self.calls for call in message.tool_calls)
        return minted or node.message == message

    def echoed(self, message: Message) -> Turn | None:
        """The turn that a message with tool calls sends back whole, in whatever context."""
        turn = self.calls.get(message.tool_calls[0].id) if message.tool_calls else None
        return turn if turn is not None and turn.message.digest == message.digest else None

    def returned(self, request: Request, match: Match) -> None:
        """Mark the turns that a request proves to have been delivered: those on its path, and those it quotes elsewhere."""
        for message in request.messages[match.seen_position :]:
            turn = self.echoed(message) if message.tool_calls else None
            if turn is not None and not turn.returned:
                turn.returned, turn.drift = True, drift(turn.message.tool_calls, message.tool_calls)
        node: Node | None = match.turn
        while node is not None and node is not match.seen:
            if isinstance(node, Turn):
                node.returned = True
            node = node.parent

    def prompt(self, place: Place) -> np.ndarray:
        """int32 [place.end]: everything that the engine is to read."""
        parts, node = [int32(place.scaffold)], cast("Node | None", place.node)
        known, ids = self._read
        while node is not None and node is not known:
            parts.append(node.ids)
            node = node.parent
        prompt = np.concatenate([ids, *reversed(parts)] if node is not None else parts[::-1])
        self._read = place.node, prompt[: place.node.end]
        return prompt

    def rest(self) -> None:
        """Nothing more will be asked: what only made that faster is let go."""
        self._trails.clear()
        self._read = None, np.zeros(0, np.int32)

    def place(self, request: Request, ids: Sequence[int], ends: Sequence[int], behind: Match | None) -> Place:
        """Hang the messages behind a matched turn (all of them when None) into the graph, reusing nodes of equal message and ids.

        `ids` start where `behind` ends and `ends` cut them at message ends; what follows the last end is the generation prompt.
        """
        node: Node | None = behind.turn if behind else None
        messages = request.messages[behind.position if behind else 0 :]
        node = node or self.roots.setdefault(request.tools_key, Node(ROOT, None, np.zeros(0, np.int32)))
        fresh, base = int32(ids), node.end
        for message, end in zip(messages, ends, strict=True):
            at = node.end - base
            known = (c for c in node.children.get(message.digest, ()) if np.array_equal(fresh[at : at + len(c.ids)], c.ids))
            node = next(known, None) or self._new(Node(message, node, fresh[at : max(at, end)].copy()))
        return Place(node, fresh[node.end - base :].tolist())

    def prune(self, node: Node, used: Collection[Node]) -> None:
        """Take out what a call brought that came to nothing, from its last node up to one that leads to a turn or is in `used`."""
        self.rest()
        while node.parent is not None and not isinstance(node, Turn) and not node.children and node not in used:
            siblings = node.parent.children[node.message.digest]
            siblings.remove(node)
            if not siblings:
                del node.parent.children[node.message.digest]
            node = node.parent

    def add_turn(
        self,
        place: Place,
        message: Message,
        generation: Generation,
        request: Request,
        *,
        malformed: int,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turn:
        """`spans` are the policy versions that sampled the turn, as in `Turn.spans`; None when `generation.version` sampled all of it."""
        turn = Turn(
            message,
            place.node,
            int32(place.scaffold + generation.token_ids),
            index=len(self.turns),
            call=request.call,
            thread=request.thread,
            tools=request.tools_key,
            scaffold=len(place.scaffold),
            log_probs=np.asarray(generation.log_probs, np.float32),
            spans=list(spans or [(0, generation.version)]),
            stop=generation.stop_reason,
            malformed=malformed,
            prompt_tokens=place.end,
            side=BranchClass(request.kind_hint) if request.kind_hint else None,
        )
        self._new(turn)
        self.turns.append(turn)
        self.calls.update((call.id, turn) for call in message.tool_calls)
        return turn

    def _new(self, node: Node) -> Node:
        if node.parent is not None and len(node.parent.children[node.message.digest]) > 1:
            self._twins = True
            self._trails.clear()
        return node


def int32(ids: Sequence[int]) -> np.ndarray:
    """int32 [n]; numpy takes five times as long to look at every number of a list."""
    return np.frombuffer(array("i", ids), np.int32)


def store_routes(turn: Turn, routes: np.ndarray, first: int) -> bool:
    """Attribute rows for positions `first … turn.end - 2` to the nodes on the path.

    Rows already known stay. False, and nothing stored, when the number of rows is not the one that the positions ask for: rows are
    dropped rather than shifted. The last sampled token has no row until a later call's prefill brings it.
    """
    if len(routes) != turn.end - 1 - first:
        return False
    for node in reversed(turn.path()):
        low, high = max(node.start, first), min(node.end, turn.end - 1)
        if low < high:
            if node.routes is None:
                node.routes = np.zeros((len(node.ids), *routes.shape[1:]), routes.dtype)
            here = slice(low - node.start, high - node.start)
            missing = ~node.routed[here]
            node.routes[here][missing] = routes[low - first : high - first][missing]
            node.routed[here] = True
        if node.start <= first:
            break
    return True
