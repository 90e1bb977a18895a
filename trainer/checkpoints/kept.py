"""The checkpoints of a run, and the best one by its held-out evaluations."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from server.schemas.probes import TRAINED_WITH
from server.schemas.rundir import BestFile, RunDir, write_atomic


@dataclass(frozen=True, slots=True)
class Kept:
    """Weights after `step` updates, and what else leads to them: `best`, `final`."""

    step: int
    weights: Path
    names: tuple[str, ...]


def folder(run: RunDir, step: int) -> Path:
    return run.checkpoints / f"global_step_{step}"


def weights(run: RunDir, step: int) -> Path:
    """verl's Megatron writes them a level deeper than its other backends."""
    actor = folder(run, step) / "actor"
    deeper = actor / "model" / "huggingface"
    return deeper if deeper.is_dir() else actor / "huggingface"


def kept(run: RunDir) -> list[Kept]:
    """In the order of their steps. Those that were being written when the trainer died lack the file that is written last."""
    best, final = read_best(run), run.checkpoints / "final"
    last = final.resolve() if final.is_symlink() else None
    steps = sorted(int(path.name.rpartition("_")[2]) for path in run.checkpoints.glob("global_step_*"))
    found = []
    for step in (step for step in steps if (weights(run, step) / TRAINED_WITH).is_file()):
        names = {"best": best is not None and best.step == step, "final": weights(run, step).resolve() == last}
        found.append(Kept(step, weights(run, step), tuple(name for name, is_so in names.items() if is_so)))
    return found


def read_best(run: RunDir) -> BestFile | None:
    try:
        return BestFile.model_validate_json(run.best_checkpoint.read_bytes())
    except (FileNotFoundError, ValidationError):  # none yet; a file from elsewhere is written anew
        return None


def is_best(run: RunDir, resolved: int, total: int) -> bool:
    """Whether a held-out evaluation beats all before it; the earlier of two equal ones stays."""
    best = read_best(run)
    return best is None or resolved * best.total > best.resolved * total


def name_best(run: RunDir, best: BestFile) -> None:
    write_atomic(run.best_checkpoint, best.model_dump_json())


def forget_after(run: RunDir, step: int) -> None:
    """A trainer that goes on from `step` does the later steps again: what was saved of them, perhaps in part, is no more."""
    best = read_best(run)
    if best is not None and best.step > step:
        run.best_checkpoint.unlink()
    for path in run.checkpoints.glob("global_step_*"):
        if int(path.name.rpartition("_")[2]) > step:
            shutil.rmtree(path)


def prune(run: RunDir, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and the best one. verl itself forgets those of an earlier attempt."""
    best = read_best(run)
    folders = sorted(run.checkpoints.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    for path in folders[:-keep]:
        if best is None or path != folder(run, best.step):
            shutil.rmtree(path)
