"""From the graph to training samples: one per branch, and every sampled token in exactly one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from server.schemas.capture import BranchClass, BranchReason, Exclusion
from server.schemas.runspec import TrainRule
from trainer.capture import conversations
from trainer.capture.branches import reasons
from trainer.capture.conversations import Reading
from trainer.capture.graph import Node, Turn
from trainer.capture.sample import Sample

FORKS = frozenset(BranchReason) - {BranchReason.ROOT, BranchReason.SUB_AGENT, BranchReason.SUMMARY, BranchReason.AUXILIARY}
"""Reasons of branches that leave another one."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A root-to-leaf path. `owned` are the turns trained here; the other turns of the path are context that another branch trains."""

    turns: tuple[Turn, ...]
    owned: tuple[Turn, ...]
    reason: BranchReason
    branch_class: BranchClass
    excluded: Exclusion | None


@dataclass(frozen=True, slots=True)
class _Line:
    """A candidate: the turns of one conversation up to a leaf. `starts` are the reasons on it, by turn."""

    turns: list[Turn]
    leaf: Reading
    starts: Mapping[int, BranchReason]
    excluded: Exclusion | None

    @property
    def forks(self) -> int:
        return sum(self.starts.get(turn.index) in FORKS for turn in self.turns)

    @property
    def rank(self) -> tuple[bool, bool, int, int, int]:
        lost = self.excluded is Exclusion.UNDELIVERED
        return lost, self.excluded is not None, self.forks, -len(self.turns), self.leaf.turn.index

    def reason(self, first: Turn) -> BranchReason:
        """Why the part of the line begins that a turn is in."""
        here = [self.starts[turn.index] for turn in self.turns if turn.index <= first.index and turn.index in self.starts]
        return here[-1]


def branches(turns: Sequence[Turn], context: int, rule: TrainRule) -> list[Branch]:
    """Branches in the order of their first owned turn.

    A shared turn goes to a branch that is trained before one that is not, then to the one whose history was rewritten less often, then to
    the one with more turns. A branch longer than `context` tokens is excluded, never cut.
    """
    readings, lost = conversations.read(turns), undelivered(turns)
    starts = reasons(readings, lost)
    inner = _continued(reading for reading in readings if reading.turn.index not in lost)
    lines = [
        _Line([other.turn for other in _line(reading)], reading, starts, _exclusion(reading, lost, context))
        for reading in readings
        if reading.turn.index not in inner
    ]
    found, taken = [], set[int]()
    for line in sorted(lines, key=lambda line: line.rank):
        owned = tuple(turn for turn in line.turns if turn.index not in taken)
        taken.update(turn.index for turn in owned)
        excluded = line.excluded or (_off_parent(line) if rule is TrainRule.PARENT_EXACT else None)
        found.append(Branch(tuple(line.leaf.turn.turns()), owned, line.reason(owned[0]), line.leaf.branch_class, excluded))
    return sorted(found, key=lambda branch: branch.owned[0].index)


def _continued(readings: Iterable[Reading]) -> set[int]:
    """Indices of turns that lie before one of their own conversation."""
    found = set[int]()
    for reading in readings:
        at = reading.before
        while at is not None and (at.group != reading.group or at.turn.index not in found):
            found |= {at.turn.index} if at.group == reading.group else set()
            at = at.before
    return found


def _line(reading: Reading) -> list[Reading]:
    """The turns of the same conversation on the path to a turn, and itself."""
    line, at = [reading], reading.before
    while at is not None:
        line += [at] if at.group == reading.group else []
        at = at.before
    return line[::-1]


def _off_parent(line: _Line) -> Exclusion | None:
    """The paper isolates sub-agents from the parent's capture, and leaves out what follows a rewritten history (3.2.2, 4.4)."""
    if line.leaf.branch_class is BranchClass.SUB_AGENT:
        return Exclusion.OTHER_THREAD
    return Exclusion.UNALIGNED if line.forks or line.leaf.branch_class is not BranchClass.POLICY else None


def undelivered(turns: Sequence[Turn]) -> set[int]:
    """Indices of turns that the client does not hold.

    Delivery is proven by return. Of several samples for one request that never came back, the newest that was written out is the one
    that the client can have kept.
    """
    calls: dict[object, list[Turn]] = {}
    for turn in turns:
        calls.setdefault(turn.call, []).append(turn)
    kept = set()
    for same in calls.values():
        returned = [turn.index for turn in same if turn.returned]
        kept.update(returned or [turn.index for turn in same if turn.sent][-1:])
    return {turn.index for turn in turns} - kept


def sample(branch: Branch, like: np.ndarray | None) -> Sample:
    """Token arrays of one branch. An excluded branch keeps its mask, so that its tokens can be counted.

    `like` has the shape and type of a row of routes, None for a dense model.
    """
    path = branch.turns[-1].path()
    tokens = np.concatenate([node.ids for node in path])
    mask, routed = np.zeros(len(tokens), bool), np.concatenate([node.routed for node in path])
    log_probs, versions = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
    for turn in branch.owned:
        here = slice(turn.start + turn.scaffold, turn.end)
        mask[here], log_probs[here], versions[here] = True, turn.log_probs, turn.versions()
    routed[-1] = False  # the last token of a branch is never an input
    first = branch.owned[0]
    return Sample(
        tokens=tokens,
        mask=mask,
        log_probs=log_probs,
        versions=versions,
        routes=None if like is None else np.concatenate([_routes(node, like) for node in path]),
        routed=routed,
        prompt_len=first.start + first.scaffold,
        reason=branch.reason,
        branch_class=branch.branch_class,
        excluded=branch.excluded,
    )


def _exclusion(leaf: Reading, lost: set[int], context: int) -> Exclusion | None:
    if leaf.turn.index in lost:
        return Exclusion.UNDELIVERED
    if leaf.branch_class is BranchClass.AUXILIARY:
        return Exclusion.AUXILIARY
    return Exclusion.OVER_BUDGET if leaf.turn.end > context else None


def _routes(node: Node, like: np.ndarray) -> np.ndarray:
    return node.routes if node.routes is not None else np.zeros((len(node.ids), *like.shape[1:]), like.dtype)
