"""What a harness did to the arguments of a call on their way back. Only counted: tokens come from what was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from server.schemas.capture import Drift
from trainer.capture.message import ToolCall

CHANGE_DIR = re.compile(r"^cd \S+ && ")


def drift(sampled: Sequence[ToolCall], echoed: Sequence[ToolCall]) -> Drift | None:
    """How the calls came back; both sides hold the same ids in the same order. None when nothing differs."""
    found = None
    for ours, theirs in zip(sampled, echoed, strict=True):
        if ours.name == theirs.name and _text(ours.arguments) == _text(theirs.arguments):
            continue
        if ours.name != theirs.name or not _same(ours.arguments, theirs.arguments):
            return Drift.EDITED
        found = Drift.RESERIALISED
    return found


def _text(value: Any) -> str:
    """Tells key order and 1 from 1.0, which are equal as values."""
    return json.dumps(value)


def _same(ours: Any, theirs: Any) -> bool:
    """Equal after what harnesses are known to do: objects rebuilt in another key order with defaults added, numbers through a JavaScript
    double, numeric strings made numbers, blanks at line ends dropped, a leading `cd` into the working directory dropped (Claude Code 2.1;
    OpenCode and qwen-code share the first two)."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        added = theirs.keys() - ours.keys()
        return (
            ours.keys() <= theirs.keys()
            and all(theirs[key] is False or theirs[key] is None for key in added)
            and all(_same(value, theirs[key]) for key, value in ours.items())
        )
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    if isinstance(theirs, int | float) and isinstance(ours, int | float | str):
        return _number(ours) == _number(theirs)
    if isinstance(ours, str) and isinstance(theirs, str):
        return _trimmed(ours) == _trimmed(theirs)
    return bool(ours == theirs)


def _number(value: float | str) -> float | None:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in CHANGE_DIR.sub("", text).split("\n"))
