"""What of a run's specification is no longer as it was when a checkpoint was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from server.schemas.runspec import RunSpec

SECTIONS = ("model", "harnesses", "data", "sandbox", "rollout", "capture", "algorithm", "trainer")
"""What the curve of a run depends on: deadlines and limits of a sandbox decide outcomes too."""


def learning_side(spec: RunSpec) -> dict[str, Any]:
    """Plain values, as a checkpoint keeps them."""
    return spec.model_dump(mode="json", include=set(SECTIONS))


def changes(before: Mapping[str, Any], spec: RunSpec) -> list[str]:
    """`algorithm.clip_low: 0.03 → 0.04` for every field that differs. A field that one of the two does not know yet is none."""
    old, new = dict(_flat(before)), dict(_flat(learning_side(spec)))
    return [f"{name}: {value} → {new[name]}" for name, value in old.items() if name in new and value != new[name]]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
