"""Why a call is not the continuation of the one before it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import takewhile

from server.schemas.capture import BranchClass, BranchReason
from trainer.capture.conversations import SIDE, Reading
from trainer.capture.graph import Node, Turn

OPENINGS = {
    BranchClass.POLICY: BranchReason.ROOT,
    BranchClass.SUB_AGENT: BranchReason.SUB_AGENT,
    BranchClass.SUMMARY: BranchReason.SUMMARY,
    BranchClass.AUXILIARY: BranchReason.AUXILIARY,
}


def reasons(readings: Sequence[Reading], lost: Set[int]) -> dict[int, BranchReason]:
    """Turn index → why a branch starts there, for turns where one does.

    Where the harness went on without a turn, the turn is the side branch and the one that took its place goes on with the old one. So it
    is with answers to one request: one of `lost`, which never reached the harness, makes room for one that did.
    """
    found: dict[int, BranchReason] = {}
    tips: dict[tuple[int, BranchClass], Reading] = {}
    answers: dict[bytes, Reading] = {}
    gone_on = set[int]()
    for reading in readings:
        tip, rival, index = tips.get(reading.group), answers.setdefault(reading.turn.call, reading), reading.turn.index
        before = reading.before if reading.extends and reading.before and reading.before.group == reading.group else None
        replaced = None
        if tip is None or (before is None and reading.branch_class in SIDE):
            found[index] = OPENINGS[reading.branch_class]
        elif rival is not reading:
            found[index] = BranchReason.RETRY
            if rival.turn.index in lost and index not in lost:
                answers[reading.turn.call], replaced = reading, rival
        elif before is None or before.turn.index in gone_on:
            found[index] = _fork(reading, tip)
            replaced = tip if found[index] is BranchReason.MALFORMED_TURN and index not in lost else None
        if replaced is not None and (replaced.before, replaced.group) == (reading.before, reading.group):
            _change_places(found, index, replaced.turn.index)
        if before is not None:
            gone_on.add(before.turn.index)
        tips[reading.group] = reading
    return found


def _change_places(found: dict[int, BranchReason], new: int, old: int) -> None:
    reason, inherited = found.pop(new), found.pop(old, None)
    found |= {old: reason} if inherited is None else {old: reason, new: inherited}


def _fork(reading: Reading, tip: Reading) -> BranchReason:
    if reading.summary is not None:
        return BranchReason.COMPACTION
    return _edited(reading, tip) if reading.turn.tools == tip.turn.tools else BranchReason.TOOLS_CHANGED


def _edited(reading: Reading, tip: Reading) -> BranchReason:
    """By the first message in which the new context differs from the one of the newest turn."""
    mine, theirs = [node.message for node in reading.nodes], [node.message for node in tip.nodes]
    same = sum(1 for _ in takewhile(lambda pair: _alike(*pair), zip(reading.nodes, tip.nodes, strict=False)))
    new = mine[same] if same < len(mine) else None
    if same == len(theirs):  # all that came before the newest turn is there
        if new is not None and new.key == tip.turn.message.key:
            return BranchReason.TEMPLATE_STRIP
        shown = tip.turn.message.content or tip.turn.message.tool_calls
        dropped = new is None or new.role != "assistant" or tip.turn.malformed
        return BranchReason.MALFORMED_TURN if shown and dropped else BranchReason.HISTORY_EDITED
    lost = [turn.index for turn in (*tip.turns, tip.turn) if not reading.holds(turn)]
    if lost and max(reading.echoed, default=-1) > lost[0]:
        return BranchReason.COMPACTION
    if new is None or new.content.startswith(theirs[same].content) or same > _first_user(reading):
        return BranchReason.HISTORY_EDITED
    return BranchReason.COMPACTION if lost and new.role == "user" else BranchReason.HISTORY_EDITED


def _alike(one: Node, other: Node) -> bool:
    """Ids stand for the words of a sampled turn only."""
    sampled = isinstance(one, Turn) or isinstance(other, Turn)
    return one.message.key == other.message.key and (sampled or not one.message.tool_calls or one.message == other.message)


def _first_user(reading: Reading) -> int:
    return next((i for i, node in enumerate(reading.nodes) if node.message.role == "user"), len(reading.nodes))
