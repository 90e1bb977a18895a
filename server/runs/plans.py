"""What a spec amounts to: how many trials, which evaluations, in one sentence. A run starts from a plan that was shown."""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy.orm import Session

from ..db.models import PlanRow
from ..schemas.checks import Plan
from ..schemas.runspec import Kind, RunSpec
from ..spec import Resolved, SpecError
from ..spec.layers import problem


def train_steps(spec: RunSpec) -> int:
    """Updates of the weights; an evaluation has none."""
    return spec.trainer.steps if spec.kind is Kind.TRAIN else 0


def evaluation_steps(spec: RunSpec) -> list[int]:
    """Numbers of updates after which the held-out set is evaluated: before the first, between when asked for, after the last."""
    every, steps = spec.trainer.evaluation.every, train_steps(spec)
    return [0, *(range(every, steps, every) if every else ()), *([steps] if steps else ())]


def trials_per_step(spec: RunSpec) -> int:
    return spec.rollout.tasks_per_step * spec.rollout.group_size


def expected_trials(spec: RunSpec) -> int:
    return train_steps(spec) * trials_per_step(spec) + len(evaluation_steps(spec)) * spec.trainer.evaluation.rollouts


def named_paths(spec: RunSpec) -> dict[str, Path]:
    """RunSpec field → the directory that it names on this machine; a run in a cluster finds them there."""
    if spec.trainer.launcher == "kubernetes":
        return {}
    named = {"data.train": spec.data.train, "data.held_out": spec.data.held_out}
    if not spec.model.path.startswith("builtin:"):
        named["model.path"] = Path(spec.model.path)
    return {name: path for name, path in named.items() if path is not None}


def is_directory(path: Path) -> bool:
    """False, too, where it cannot be looked at: a parent is locked, the name is too long."""
    try:
        return path.is_dir()
    except OSError:
        return False


def make_plan(session: Session, resolved: Resolved) -> Plan:
    """Stored under its digest; the same spec twice is the same plan. Raises SpecError for a kind of run that does not exist yet and for
    directories that are not there."""
    spec = resolved.spec
    if spec.kind is Kind.INFER:
        raise SpecError(problem("kind", f"runs of kind {spec.kind} are not there yet", "use kind: train or eval"))
    for field, path in named_paths(spec).items():
        if not is_directory(path):
            raise SpecError(problem(field, f"{field}: there is no directory {path}", "give one, relative to the spec's file or absolute"))
    plan = Plan(
        digest=resolved.digest,
        summary=_sentence(spec),
        spec=spec.model_dump(mode="json"),
        provenance=resolved.provenance,
        expected_trials=expected_trials(spec),
    )
    row = PlanRow(digest=plan.digest, spec=plan.spec, provenance=plan.provenance, summary=plan.summary, created=time.time())
    session.merge(row)
    return plan


def _sentence(spec: RunSpec) -> str:
    harnesses = ", ".join(f"{harness.name} {harness.version}" for harness in spec.harnesses)
    evaluations = len(evaluation_steps(spec))
    if spec.kind is Kind.EVAL:
        return (
            f"Evaluate {spec.model.path} inside {harnesses} on the held-out tasks of {spec.data.family or spec.data.held_out}: "
            f"{spec.trainer.evaluation.rollouts} trials at temperature {spec.rollout.temperature:g}, on the {spec.trainer.device.upper()}."
        )
    return (
        f"Train {spec.model.path} inside {harnesses} on {spec.data.family or spec.data.train}: {spec.trainer.steps} steps of "
        f"{spec.rollout.tasks_per_step} tasks × {spec.rollout.group_size} samples, {evaluations} held-out evaluations of "
        f"{spec.trainer.evaluation.rollouts}, {expected_trials(spec)} trials in all, on the {spec.trainer.device.upper()}."
    )
