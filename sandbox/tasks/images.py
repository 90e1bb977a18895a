"""The image of a task: the one it names, the one its Dockerfile makes, or the run's."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from pathlib import Path

from sandbox.environments.images.build import FILE, reference
from server.schemas.runspec import Sandbox as Settings


def image_of(task: Path, settings: Settings) -> str | None:
    """None: sandboxes show this machine's programs. Reads all of `environment/` the first time, where a Dockerfile is to be built."""
    if named := _named(task):
        return named
    if settings.images.build and (task / "environment" / FILE).is_file():
        return _built(task, settings.images.index_mirror)
    return settings.image


def images_of(tasks: Iterable[Path], settings: Settings) -> dict[str, Path | None]:
    """Every image of these tasks, with the directory of its Dockerfile where it has to be built."""
    found: dict[str, Path | None] = {}
    for task in tasks:
        if image := image_of(task, settings):
            found[image] = task / "environment" if image not in (_named(task), settings.image) else None
    return found


def _named(task: Path) -> str | None:
    environment = tomllib.loads((task / "task.toml").read_text(encoding="utf-8")).get("environment", {})
    return str(environment.get("docker_image") or "") or None


@functools.lru_cache(maxsize=1 << 14)
def _built(task: Path, mirror: str) -> str:
    """A task of a run does not change."""
    return reference(task.name, task / "environment", mirror)
