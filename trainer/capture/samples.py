"""From the graph to training samples: one per branch, and every sampled token in exactly one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from server.schemas.capture import BranchClass, BranchReason, Exclusion
from server.schemas.runspec import TrainRule
from trainer.capture.graph import Node, Turn
from trainer.capture.sample import Sample


@dataclass(frozen=True, slots=True)
class Branch:
    """A root-to-leaf path. `owned` are the turns trained here; the other turns of the path are context that another branch trains."""

    turns: tuple[Turn, ...]
    owned: tuple[Turn, ...]
    branch_class: BranchClass
    excluded: Exclusion | None

    @property
    def reason(self) -> BranchReason:
        first = self.owned[0]
        return first.diverged or first.abandoned or BranchReason.ROOT


def branches(turns: Sequence[Turn], context: int, rule: TrainRule) -> list[Branch]:
    """Branches in the order of their first owned turn.

    A shared turn goes to a branch that is trained before one that is not, then to the one with more turns, then to the one that the
    harness went on with. A branch longer than `context` tokens is excluded, never cut.
    """
    lost = undelivered(turns)
    inner = {turn.index for leaf in turns if leaf.index not in lost for turn in leaf.turns()[:-1]}
    paths = []
    for leaf in turns:
        if leaf.index not in inner:
            branch_class = _class_of(leaf, turns)
            paths.append((_exclusion(leaf, branch_class, lost, context), leaf.turns(), branch_class))
    paths.sort(key=_precedence)
    found, taken = [], set[int]()
    for excluded, line, branch_class in paths:
        owned = tuple(turn for turn in line if turn.index not in taken)
        taken.update(turn.index for turn in owned)
        found.append(Branch(tuple(line), owned, branch_class, excluded))
    if rule is TrainRule.PARENT_EXACT:
        found = [_parent_only(branch) for branch in found]
    return sorted(found, key=lambda branch: branch.owned[0].index)


def _parent_only(branch: Branch) -> Branch:
    """The paper isolates sub-agents from the parent's capture and leaves out what a rewritten history cannot align (3.2.2, 4.4)."""
    if branch.excluded or (branch.branch_class is BranchClass.POLICY and branch.reason is BranchReason.ROOT):
        return branch
    other = branch.branch_class is BranchClass.SUB_AGENT
    return dataclasses.replace(branch, excluded=Exclusion.OTHER_THREAD if other else Exclusion.UNALIGNED)


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


def _precedence(path: tuple[Exclusion | None, list[Turn], BranchClass]) -> tuple[bool, bool, int, bool, int]:
    excluded, line, _ = path
    return excluded is Exclusion.UNDELIVERED, excluded is not None, -len(line), line[-1].abandoned is not None, line[-1].index


def _class_of(leaf: Turn, turns: Sequence[Turn]) -> BranchClass:
    """By thread header or divergence; a call without tools in a rollout that has tools is the harness's own side call."""
    if not leaf.tools and any(turn.tools for turn in turns):
        return BranchClass.AUXILIARY
    main = next((turn for turn in turns if turn.tools), turns[0])
    if leaf.thread != main.thread or any(turn.diverged is BranchReason.SUB_AGENT for turn in leaf.turns()):
        return BranchClass.SUB_AGENT
    return BranchClass.POLICY


def _exclusion(leaf: Turn, branch_class: BranchClass, lost: set[int], context: int) -> Exclusion | None:
    if leaf.index in lost:
        return Exclusion.UNDELIVERED
    if branch_class is BranchClass.AUXILIARY:
        return Exclusion.AUXILIARY
    return Exclusion.OVER_BUDGET if leaf.end > context else None


def _routes(node: Node, like: np.ndarray) -> np.ndarray:
    return node.routes if node.routes is not None else np.zeros((len(node.ids), *like.shape[1:]), like.dtype)
