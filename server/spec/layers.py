"""The layers of a RunSpec, lowest first: presets, the user's document, overrides.

Mappings merge key by key, everything else (lists too) is replaced whole.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from ..schemas.checks import Check, Level

Tree = dict[str, Any]

DEEPEST = 16
"""Sections within sections; no field lies deeper."""


class SpecError(Exception):
    """The user's spec is wrong: one Check per problem."""

    def __init__(self, *problems: Check) -> None:
        super().__init__("; ".join(f"{p.message}{f' ({p.fix})' if p.fix else ''}" for p in problems))
        self.problems = list(problems)


@dataclass(frozen=True, slots=True)
class Layer:
    label: str
    """What provenance says: `preset NAME`, `file PATH`, `override`."""
    tree: Tree


def problem(where: str, message: str, fix: str = "") -> Check:
    return Check(code="spec", level=Level.ERROR, where=where, message=message, fix=fix)


def did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(sorted(known))}"


def preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in _presets().iterdir() if entry.name.endswith(".yaml"))


def layers(document: Tree, overrides: dict[str, Any], label: str) -> list[Layer]:
    """All layers, lowest first. Raises SpecError for an unknown preset, a cycle, or an override that leads nowhere."""
    tree = dict(document)
    below = _preset_layers(tree.pop("extends", None), label, ())
    above = [Layer(label, tree)] if tree else []
    return [*below, *above, *(Layer("override", _nest(path, value)) for path, value in overrides.items())]


def merge(low: Tree, high: Tree) -> Tree:
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def leaves(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Dotted path → value of everything that is no mapping."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return flat


def _presets() -> Any:
    return resources.files("server") / "presets"


def _preset_layers(extends: Any, label: str, seen: tuple[str, ...]) -> list[Layer]:
    if extends is None:
        return []
    names = extends if isinstance(extends, list) else [extends]
    found: list[Layer] = []
    for name in names:
        if name not in preset_names():
            raise SpecError(problem("extends", f"{label} extends {name!r}, which is no preset", did_you_mean(str(name), preset_names())))
        if name in seen:
            raise SpecError(problem("extends", f"preset {name!r} extends itself"))
        tree = yaml.safe_load((_presets() / f"{name}.yaml").read_text())
        found += _preset_layers(tree.pop("extends", None), f"preset {name}", (*seen, name))
        found.append(Layer(f"preset {name}", tree))
    return found


def _nest(path: str, value: Any) -> Tree:
    keys = path.split(".")
    if not all(keys) or len(keys) > DEEPEST:
        raise SpecError(problem(path[:100], f"override {path[:100]!r} is not a field such as trainer.steps"))
    for key in reversed(keys):
        value = {key: value}
    return dict(value)
