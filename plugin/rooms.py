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


class Verb(NamedTuple):
    room: Room
    help: str
    elsewhere: dict[str, Room] = {}  # noqa: RUF012  (never changed)
    """Sub-commands that another room has."""
    takes_data_dir: bool = False
    hidden: bool = False
    """Reserved: the room refuses it until it has it."""

    def room_of(self, args: tuple[str, ...]) -> Room:
        return self.elsewhere.get(args[0], self.room) if args else self.room


VERBS = {
    "bench": Verb(TRAINER, "Measure proxy, engine, sandboxes and trials.", {"trials": SANDBOX, "sandbox": SANDBOX}),
    "checkpoint": Verb(TRAINER, "List and export the weights of a run.", takes_data_dir=True),
    "doctor": Verb(SANDBOX, "Look for what sandboxes leave behind and for what makes them slow.", takes_data_dir=True),
    "harness": Verb(SANDBOX, "Install, list, verify and prune pinned harness runtimes.", takes_data_dir=True),
    "image": Verb(SANDBOX, "Fetch, build, list and prune images of sandboxes.", takes_data_dir=True),
    "purge": Verb(SANDBOX, "Take broken tasks out of a task index, by the evidence of runs.", takes_data_dir=True),
    "r3": Verb(TRAINER, "Measure routing replay against its negative control."),
    "redteam": Verb(SANDBOX, "Try to earn rewards without solving tasks."),
    "regrade": Verb(SANDBOX, "Judge the archived work of a run's agents again, without them.", takes_data_dir=True),
    "replay": Verb(TRAINER, "Replay recorded harness traffic through proxy and capture."),
    "tasks": Verb(SANDBOX, "Make and check task directories.", hidden=True),
}


def room_command(room: Room, args: list[str], module: str = "") -> list[str]:
    """Argv that runs a room's command line (or another `module` of the room). Raises ControlError naming the command that installs it."""
    name = module or room.module
    top = name.partition(".")[0]
    if importlib.util.find_spec(room.needs) is None:
        raise ControlError(f"`{top}` is not installed here: run `make install` (everything) or `{room.install}` in the checkout")
    return [sys.executable, "-P", "-m", name, *args]
