"""Verbs that belong to another room run there: `python -m trainer.cli` or `python -m sandbox.cli` in this environment."""

from __future__ import annotations

import importlib.util
import sys
from typing import NamedTuple

from .errors import ControlError


class Room(NamedTuple):
    module: str
    needs: str
    """A package that only the room's extra installs."""
    install: str


SANDBOX = Room("sandbox.cli", "harbor", "uv sync --extra sandbox --inexact")
TRAINER = Room("trainer.cli", "verl", "uv sync --extra trainer --inexact")

VERBS: dict[str, tuple[Room, str]] = {
    "bench": (TRAINER, "Measure proxy, capture and engine."),
    "harness": (SANDBOX, "Install and list pinned harness runtimes."),
    "r3": (TRAINER, "Work with routing replay."),
    "redteam": (SANDBOX, "Try to earn rewards without solving tasks."),
    "replay": (TRAINER, "Replay recorded rollouts through proxy and capture."),
    "tasks": (SANDBOX, "Make and check task directories."),
}


def room_command(room: Room, args: list[str], module: str = "") -> list[str]:
    """Argv that runs a room's command line (or another `module` of the room). Raises ControlError naming the command that installs it."""
    name = module or room.module
    top = name.partition(".")[0]
    if importlib.util.find_spec(room.needs) is None:
        raise ControlError(f"`{top}` is not installed here: run `make install` (everything) or `{room.install}` in the checkout")
    return [sys.executable, "-P", "-m", name, *args]
