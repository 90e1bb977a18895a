"""Weights of a run as a Hugging Face checkpoint: the base's files, layout and types, with what training made of its tensors.

Names and shapes must be those of the base, to the last tensor, and every value finite: a checkpoint that misses a tensor is loaded by
most engines without a word, and speaks garbage.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from server.schemas.probes import TRAINED_WITH

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
FIRST = 5
"""Tensors that a message names."""


class ExportError(Exception):
    """One line: what is wrong with which checkpoint, and what to do."""


@dataclass(frozen=True, slots=True)
class Exported:
    directory: Path
    tensors: int
    changed: int
    """Tensors that differ from the base's; none after a run without an update."""


def export(weights: Path, base: Path, to: Path) -> Exported:
    """Write `to`, which must not exist; it appears whole or not at all. Raises ExportError; OSError from the disk."""
    if to.exists():
        raise ExportError(f"{to} exists: give a directory that does not")
    ours, theirs = Checkpoint(weights), Checkpoint(base)
    _compare(ours, theirs)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as directory:
        made = Path(directory) / "made"
        made.mkdir()
        for file in sorted(base.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES:
                shutil.copyfile(file, made / file.name)
        if (weights / TRAINED_WITH).is_file():
            shutil.copyfile(weights / TRAINED_WITH, made / TRAINED_WITH)
        changed = sum(_write_shard(ours, theirs, shard, made) for shard in theirs.shards)
        made.rename(to)
    return Exported(to, len(theirs.places), changed)


class Checkpoint:
    """The tensors of a directory, in one file or in the shards of an index. Raises ExportError when they cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            if (directory / INDEX).is_file():
                self.places: dict[str, str] = json.loads((directory / INDEX).read_bytes())["weight_map"]
            else:
                with safe_open(directory / SINGLE, "pt") as file:
                    self.places = dict.fromkeys(file.keys(), SINGLE)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ExportError(f"{directory} holds no readable safetensors checkpoint: {error}") from error

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.places.values()))

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes from the headers; no tensor is read."""
        for shard in self.shards:
            with safe_open(self.directory / shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    yield name, tuple(file.get_slice(name).get_shape())

    def load(self, name: str) -> torch.Tensor:
        with safe_open(self.directory / self.places[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _compare(ours: Checkpoint, theirs: Checkpoint) -> None:
    """A tied output layer may stand in one of the two and not in the other: it is the embedding again."""
    made, wanted = dict(ours.shapes()), dict(theirs.shapes())
    tied = {"lm_head.weight"} if _is_tied(theirs.directory) else set[str]()
    problems = [
        ("lacks", sorted(wanted.keys() - made.keys() - tied)),
        ("has besides", sorted(made.keys() - wanted.keys() - tied)),
        (
            "has in another shape",
            [f"{name} {made[name]} for {wanted[name]}" for name in wanted if made.get(name, wanted[name]) != wanted[name]],
        ),
    ]
    found = [
        f"{what} {', '.join(names[:FIRST])}{f' and {len(names) - FIRST} more' if len(names) > FIRST else ''}"
        for what, names in problems
        if names
    ]
    if found:
        raise ExportError(f"{ours.directory} does not fit {theirs.directory}: it {'; it '.join(found)}")


def _is_tied(directory: Path) -> bool:
    config = json.loads((directory / "config.json").read_bytes())
    return bool(config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings"))


def _write_shard(ours: Checkpoint, theirs: Checkpoint, shard: str, made: Path) -> int:
    """One file of the base with our values in the base's types; returns how many tensors changed."""
    tensors, changed = {}, 0
    for name in (name for name, place in theirs.places.items() if place == shard):
        before = theirs.load(name)
        tensor = ours.load(name if name in ours.places else "model.embed_tokens.weight")
        if not torch.isfinite(tensor).all():
            raise ExportError(f"{ours.directory}: {name} holds values that are not finite: export an earlier checkpoint")
        tensors[name] = tensor.to(before.dtype).contiguous()
        changed += not torch.equal(tensors[name], before)
    save_file(tensors, made / shard, metadata={"format": "pt"})
    return changed
