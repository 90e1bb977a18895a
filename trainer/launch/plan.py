"""What the launcher would start for a spec, for people to read and for those who start verl by other means."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server.schemas.rundir import RunDir
from server.schemas.runspec import RunSpec

from . import environment
from .config import Place, overrides

RUN_ID = "RUN"
RUN_DIR = Path("/RUNS") / RUN_ID
"""Stands for a run's directory, which does not exist before the run."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    environment: dict[str, str]
    """Variables of Ray, verl and torch; a run's Ray token is drawn at its start and not shown."""
    command: list[str]
    """Argv of verl's own program with every override; the launcher composes the same ones in its own process."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """A shell command, a setting a line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += [shlex.join(self.command[:3]), *map(shlex.quote, self.command[3:])]
        yield from (f"{'  ' if number else ''}{word}{' \\' if number < len(words) - 1 else ''}" for number, word in enumerate(words))


def trainer_plan(spec: RunSpec) -> TrainerPlan:
    """Pure: no directory is looked at and nothing is started."""
    place = Place(run=RunDir(RUN_DIR), run_id=RUN_ID, model=Path(spec.model.path), ray_temp=RUN_DIR / "ray")
    return TrainerPlan(environment.settings(spec.trainer.device), ["python", "-m", "verl.trainer.main_ppo", *overrides(spec, place)])
