"""Why a call is not the continuation of the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.schemas.capture import BranchReason

if TYPE_CHECKING:
    from trainer.capture.graph import Turn


def classify(earlier: Sequence[Turn], turn: Turn, stripped: bool) -> BranchReason | None:
    """The reason why `turn` starts a branch, None when it extends one.

    `stripped` says that the renderer would not extend the turn before it. The turn that is left behind is marked with the same reason:
    whichever of the two sides becomes the side branch, it knows why.
    """
    if not any(other.tools for other in earlier) and (turn.tools or not earlier):  # side calls without tools may come first
        return BranchReason.ROOT
    if all(other.thread != turn.thread for other in earlier):
        return BranchReason.SUB_AGENT
    history = turn.turns()[:-1]
    behind = history[-1] if history else None
    if behind is not None and not behind.continued:
        return None
    rival = next((o for o in reversed(earlier) if o.thread == turn.thread and (behind is None or behind in o.turns()[:-1])), None)
    if rival is None:  # another thread went on from here first
        return BranchReason.SUB_AGENT
    line = rival.turns()
    left = line[0] if behind is None else line[line.index(behind) + 1]
    reason = _reason(turn, rival, behind, stripped)
    abandoned = rival if reason is BranchReason.MALFORMED_TURN else left
    abandoned.abandoned = abandoned.abandoned or reason
    return reason


def _reason(turn: Turn, rival: Turn, behind: Turn | None, stripped: bool) -> BranchReason:
    if rival.call == turn.call:
        return BranchReason.RETRY
    if stripped:
        return BranchReason.TEMPLATE_STRIP
    mine, theirs = turn.path(), rival.path()
    if rival.parent in mine and not rival.returned:  # all that came before the newest turn is there, and it never came back
        instead = mine[mine.index(rival.parent) + 1]
        return BranchReason.HISTORY_EDITED if instead.message.role == "assistant" else BranchReason.MALFORMED_TURN
    if behind is not None:
        return BranchReason.HISTORY_EDITED
    if mine[1].message != theirs[1].message:
        return BranchReason.SUB_AGENT
    if mine[0] is not theirs[0]:
        return BranchReason.TOOLS_CHANGED
    old, new = next((a.message, b.message) for a, b in zip(theirs, mine, strict=False) if a is not b)
    # Claude Code writes a note into the last user message when a turn had no visible output.
    return BranchReason.HISTORY_EDITED if new.content.startswith(old.content) else BranchReason.COMPACTION
