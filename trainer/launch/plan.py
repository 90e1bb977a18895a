"""What the launcher would start for a spec, for people to read and for those who start verl by other means."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
    manifest: dict[str, Any] | None = None
    """The RayJob of `trainer.launcher: kubernetes`, whose entrypoint is that launcher. The Secret with run.json comes with the run."""

    def as_json(self) -> dict[str, Any]:
        return {"environment": self.environment, "command": self.command} | ({"manifest": self.manifest} if self.manifest else {})

    def lines(self) -> Iterator[str]:
        """A shell command, a setting a line; or a manifest, which says in comments what its entrypoint composes."""
        if self.manifest is None:
            yield from self._shell()
            return
        yield f"# On the head `{self.manifest['spec']['entrypoint']}` runs verl as this command would:"
        yield from (f"#   {line}" for line in self._shell())
        yield from yaml.safe_dump(self.manifest, sort_keys=False, width=140).splitlines()

    def _shell(self) -> Iterator[str]:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += [shlex.join(self.command[:3]), *map(shlex.quote, self.command[3:])]
        yield from (f"{'  ' if number else ''}{word}{' \\' if number < len(words) - 1 else ''}" for number, word in enumerate(words))


def trainer_plan(spec: RunSpec) -> TrainerPlan:
    """Pure: no directory is looked at and nothing is started."""
    run, run_id, manifest = RUN_DIR, RUN_ID, None
    if spec.trainer.launcher == "kubernetes":
        from .kuberay import manifest as kuberay  # late: the client's import takes a second
        from .kuberay import sources

        job = kuberay.Job(run_id=RUN_ID.lower(), attempt=1, owner="plan", sources=sources.digest())
        run, run_id, manifest = Path(job.run_dir), job.run_id, kuberay.rayjob(spec, job)
    place = Place(run=RunDir(run), run_id=run_id, model=Path(spec.model.path), ray_temp=run / "ray")
    command = ["python", "-m", "verl.trainer.main_ppo", *overrides(spec, place)]
    return TrainerPlan(environment.settings(spec.trainer.device), command, manifest)
