"""Why a call is not the continuation of the one before it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import takewhile

from server.schemas.capture import BranchClass, BranchReason
from trainer.capture.conversations import SIDE, Reading
from trainer.capture.graph import Turn

OPENINGS = {
    BranchClass.POLICY: BranchReason.ROOT,
    BranchClass.SUB_AGENT: BranchReason.SUB_AGENT,
    BranchClass.SUMMARY: BranchReason.SUMMARY,
    BranchClass.AUXILIARY: BranchReason.AUXILIARY,
}


def reasons(readings: Sequence[Reading], lost: Set[int]) -> tuple[dict[int, BranchReason], dict[int, BranchReason]]:
    """Turn index → why a branch starts there, and turn index → why the harness went on without the turn.

    At a fork both sides get the reason: whichever of them becomes the side branch, it knows why. Of answers to one request, those in
    `lost` never reached the harness, so the one that did stands in their place.
    """
    found: dict[int, BranchReason] = {}
    left: dict[int, BranchReason] = {}
    tips: dict[tuple[int, BranchClass], Reading] = {}
    gone_on = set[int]()
    answers: dict[bytes, Reading] = {}
    for reading in readings:
        tip, rival = tips.get(reading.group), answers.setdefault(reading.turn.call, reading)
        before = reading.before if reading.extends and reading.before and reading.before.group == reading.group else None
        if tip is None or (before is None and reading.branch_class in SIDE):
            found[reading.turn.index] = OPENINGS[reading.branch_class]
        elif rival is not reading:
            retried = rival if rival.turn.index in lost and reading.turn.index not in lost else reading
            if retried is rival:
                answers[reading.turn.call] = reading
                found |= {reading.turn.index: found[rival.turn.index]} if rival.turn.index in found else {}
            found[retried.turn.index] = BranchReason.RETRY
        elif before is None or before.turn.index in gone_on:
            reason = found[reading.turn.index] = _fork(reading, tip)
            behind = _left_behind(reading, tip)
            if behind is not None:
                left.setdefault(behind.index, reason)
        if before is not None:
            gone_on.add(before.turn.index)
        tips[reading.group] = reading
    return found, left


def _left_behind(reading: Reading, tip: Reading) -> Turn | None:
    """The first turn of the old line that the new one does not share."""
    mine = set(map(id, reading.nodes))
    return next((node for node in [*tip.nodes, tip.turn] if isinstance(node, Turn) and id(node) not in mine), None)


def _fork(reading: Reading, tip: Reading) -> BranchReason:
    if reading.summary is not None:
        return BranchReason.COMPACTION
    return _edited(reading, tip) if reading.turn.tools == tip.turn.tools else BranchReason.TOOLS_CHANGED


def _edited(reading: Reading, tip: Reading) -> BranchReason:
    """By the first message in which the new context differs from the one of the newest turn."""
    mine, theirs = [node.message for node in reading.nodes], [node.message for node in tip.nodes]
    same = sum(1 for _ in takewhile(lambda pair: pair[0].key == pair[1].key, zip(mine, theirs, strict=False)))
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


def _first_user(reading: Reading) -> int:
    return next((i for i, node in enumerate(reading.nodes) if node.message.role == "user"), len(reading.nodes))
