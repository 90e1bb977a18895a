"""Merge the layers, validate strictly, and say of every value where it came from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..schemas.checks import Check
from ..schemas.runspec import RunSpec
from .layers import SpecError, Tree, did_you_mean, layers, leaves, merge, problem

PATH_FIELDS = ("data.train", "data.held_out", "model.path")


@dataclass(frozen=True, slots=True)
class Resolved:
    spec: RunSpec
    provenance: dict[str, str]
    """Dotted field → `default` or a layer's label. A list is one value."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON of the spec: equal for equal specs, whatever layers they came from."""
        return hashlib.sha256(canonical(self.spec).encode()).hexdigest()


def canonical(spec: RunSpec) -> str:
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def resolve(document: Tree, overrides: dict[str, Any] | None = None, base: str = "") -> Resolved:
    """The spec that a document and overrides (dotted field → value) amount to; relative paths start at `base`. Raises SpecError."""
    label = f"file in {base}" if base else "document"
    tree: Tree = {}
    origin: dict[str, str] = {}
    for layer in layers(document, overrides or {}, label):
        tree = merge(tree, layer.tree)
        origin |= dict.fromkeys(leaves(layer.tree), layer.label)
    _check_text(tree)
    _absolute(tree, base)
    try:
        spec = RunSpec.model_validate(tree)
    except ValidationError as error:
        raise SpecError(*(_explain(detail, origin) for detail in error.errors())) from None
    return Resolved(spec, {path: _origin(path, origin) for path in leaves(spec.model_dump(mode="json"))})


def _origin(path: str, origin: dict[str, str]) -> str:
    """The layer that set this field, or the list or empty mapping that holds it."""
    parts = path.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((origin[prefix] for prefix in prefixes if prefix in origin), "default")


def _check_text(tree: Tree) -> None:
    """No path, database or JSON document takes NUL or half of a surrogate pair."""
    try:
        text = json.dumps(tree, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError:
        text = "\\u0000"
    if "\\u0000" in text:
        raise SpecError(problem("spec", "the spec holds a character that is no text (NUL, or half of a surrogate pair)", "remove it"))


def _absolute(tree: Tree, base: str) -> None:
    for field in PATH_FIELDS:
        section, key = field.split(".")
        values = tree.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str) and base and not values[key].startswith("builtin:"):
            try:
                path = (Path(base) / values[key]).resolve()
            except (OSError, RuntimeError) as error:  # links that lead in a circle
                raise SpecError(problem(field, f"`{field}`: {error}", "give an existing directory")) from None
            tree[section] = values | {key: str(path)}


def _explain(detail: ErrorDetails, origin: dict[str, str]) -> Check:
    where = ".".join(str(part) for part in detail["loc"]) or "spec"
    source = f" ({_origin(where, origin)})" if _origin(where, origin) != "default" else ""
    if detail["type"] == "extra_forbidden":
        *parents, key = detail["loc"]
        return problem(where, f"unknown key `{where}`{source}", did_you_mean(str(key), _fields(RunSpec, parents)))
    if detail["type"] == "missing":
        return problem(
            where, f"`{where}` is missing", "set it, or start from a preset: `extends: local`" if len(detail["loc"]) == 1 else ""
        )
    message = detail["msg"].removeprefix("Value error, ")
    return problem(where, f"`{where}`{source}: {message[0].lower()}{message[1:]}, got {_short(detail['input'])}")


def _fields(model: type[BaseModel], path: list[str | int]) -> list[str]:
    """Names of the fields of the section at `path`; indices of lists lead to their items."""
    for part in path:
        if isinstance(part, str):
            model = _model_of(model.model_fields[part].annotation)
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_model_of(arg) for arg in get_args(annotation))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
