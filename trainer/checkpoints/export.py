"""Weights of a run as a Hugging Face checkpoint: the base's files, layout and types, with what training made of its tensors.

Names and shapes must be those of the base, to the last tensor, and every value finite: a checkpoint that misses a tensor is loaded by
most engines without a word, and speaks garbage.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from server.schemas.probes import TRAINED_WITH

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
UNTRAINED = ("mtp.", "model.visual.")
"""Parts that transformers leaves out of a text model, and so out of what it saves: draft layers, a vision tower. They stay the base's."""
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
        if elsewhere := [shard for shard in self.shards if Path(shard).name != shard]:  # an export has files of these names
            raise ExportError(f"{directory / INDEX} names a shard outside of its directory: {elsewhere[0]}")

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.places.values()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes from the headers; no tensor is read. Raises ExportError when the shards are not what the index says."""
        found: dict[str, tuple[int, ...]] = {}
        for shard in self.shards:
            try:
                with safe_open(self.directory / shard, "pt") as file:
                    names = [name for name in file.keys() if self.places.get(name) == shard]  # noqa: SIM118  (not a mapping)
                    found |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
            except (OSError, SafetensorError) as error:
                raise ExportError(f"{self.directory / shard} is no readable shard: {error}") from error
        if missing := sorted(self.places.keys() - found.keys()):
            raise ExportError(f"{self.directory} lacks {_few(missing)}, which its index names")
        return found

    def load(self, name: str) -> torch.Tensor:
        with safe_open(self.directory / self.places[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _compare(ours: Checkpoint, theirs: Checkpoint) -> None:
    """A tied output layer may stand in one of the two and not in the other: it is the embedding again. A part of UNTRAINED may be missing,
    as a whole."""
    made, wanted = ours.shapes(), theirs.shapes()
    tied = {"lm_head.weight"} if _is_tied(theirs.directory) else set[str]()
    left_out = tuple(part for part in UNTRAINED if not any(name.startswith(part) for name in made))
    problems = [
        ("lacks", sorted(name for name in wanted.keys() - made.keys() - tied if not name.startswith(left_out))),
        ("has besides", sorted(made.keys() - wanted.keys() - tied)),
        (
            "has in another shape",
            [f"{name} {made[name]} for {wanted[name]}" for name in wanted if made.get(name, wanted[name]) != wanted[name]],
        ),
    ]
    if found := [f"{what} {_few(names)}" for what, names in problems if names]:
        raise ExportError(f"{ours.directory} does not fit {theirs.directory}: it {'; it '.join(found)}")


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:FIRST])}{f' and {len(names) - FIRST} more' if len(names) > FIRST else ''}"


def _is_tied(directory: Path) -> bool:
    config = json.loads((directory / "config.json").read_bytes())
    return bool(config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings"))


def _write_shard(ours: Checkpoint, theirs: Checkpoint, shard: str, made: Path) -> int:
    """One file of the base with our values in the base's types; returns how many tensors changed."""
    tensors, changed = {}, 0
    for name in (name for name, place in theirs.places.items() if place == shard):
        before = theirs.load(name)
        tensors[name] = _counterpart(name, ours, theirs).to(before.dtype).contiguous()
        if not torch.isfinite(tensors[name]).all():
            problem = f"holds values that are not finite in the base's {before.dtype}: export an earlier checkpoint"
            raise ExportError(f"{ours.directory}: {name} {problem}")
        changed += not torch.equal(tensors[name], before)
    save_file(tensors, made / shard, metadata={"format": "pt"})
    return changed


def _counterpart(name: str, ours: Checkpoint, theirs: Checkpoint) -> torch.Tensor:
    """Our value of a tensor of the base's."""
    if name in ours.places:
        return ours.load(name)
    if name.startswith(UNTRAINED):
        return theirs.load(name)
    (embedding,) = (place for place in ours.places if place.endswith(".embed_tokens.weight"))  # the tied output layer
    return ours.load(embedding)
