"""The image of a task: the one it names, the one its Dockerfile makes, or the run's. And its tree, where that lies in the image."""

from __future__ import annotations

import logging
import shutil
import tomllib
from asyncio import to_thread
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sandbox.environments.backend import Backend
from sandbox.environments.errors import ImageError
from sandbox.environments.images.build import FILE, reference
from sandbox.integrity.gitview import HistoryError, hide
from server.schemas.rundir import write_atomic
from server.schemas.runspec import Sandbox as Settings

from .prepare import TaskError

log = logging.getLogger(__name__)

_NAME = "image.txt"
"""In a run's copy of a task."""


def image_of(task: Path, settings: Settings) -> str | None:
    """Of a run's copy of a task. None: sandboxes show this machine's programs."""
    return str(_environment(task).get("docker_image") or "") or _built(task, settings) or settings.image


def images_of(tasks: Iterable[Path], settings: Settings) -> dict[str, Path | None]:
    """Every image of these tasks, with the directory of its Dockerfile where it has to be built. Reads those directories the first time."""
    images = {task: image_of(task, settings) for task in tasks}
    return {image: task / "environment" if image == _built(task, settings) else None for task, image in images.items() if image}


def _built(task: Path, settings: Settings) -> str | None:
    """What the image of the task's Dockerfile is called, where it is to be built. Kept: the tree comes to lie beside the Dockerfile."""
    if not settings.images.build or not (task / "environment" / FILE).is_file():
        return None
    if not (task / _NAME).is_file():
        write_atomic(task / _NAME, reference(task.name, task / "environment", settings.images.index_mirror))
    return (task / _NAME).read_text()


async def take_trees(backend: Backend, tasks: Iterable[Path], settings: Settings) -> None:
    """Copy the tree of every task that has none out of its image; a repository in it becomes one commit, as in any other.

    A tree that cannot be had is told, and its task's trials fail for their image. Raises TaskError.
    """
    for task in tasks:
        workspace = task / "environment" / "workspace"
        if workspace.exists():
            continue
        scratch = task / "environment" / ".workspace"
        try:
            image = await to_thread(image_of, task, settings)
            if image is None:
                raise ImageError(
                    f"the tree of task {task.name} lies in its image, which nothing names: set sandbox.images.build or sandbox.image"
                )
            await to_thread(shutil.rmtree, scratch, ignore_errors=True)
            await backend.copy_out(image, _environment(task)["workdir"], scratch)
        except ImageError as error:
            log.warning("task %s has no tree: %s", task.name, error)
            continue
        scratch.rename(workspace)
        try:
            await to_thread(hide, task)
        except HistoryError as error:
            raise TaskError(str(error)) from error


def _environment(task: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((task / "task.toml").read_text(encoding="utf-8")).get("environment", {})
    return found
