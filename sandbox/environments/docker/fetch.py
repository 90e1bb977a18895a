"""The engine's own images: pulled or built before a run, a few at a time, and a directory of one copied to this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandbox.environments.errors import ImageError, SandboxError
from server.schemas.runspec import Images as Settings

from . import archives, collect
from .engine import Engine

log = logging.getLogger(__name__)

_TREE_MAX = 8 << 30


async def fetch_all(engine: Engine, images: Mapping[str, Path | None], settings: Settings) -> dict[str, str]:
    """Have all of `images` on the engine; returns why by image for those that cannot be had. A directory holds the image's Dockerfile."""
    slots, pace = asyncio.Semaphore(settings.pulls), asyncio.Lock()
    failed: dict[str, str] = {}

    async def one(image: str, context: Path | None) -> None:
        async with slots:
            with contextlib.suppress(ImageError):
                await engine.call(engine.api.inspect_image, image)
                return
            async with pace:
                await asyncio.sleep(settings.pull_pause_s)
            try:
                if context is not None and settings.index_mirror:
                    raise ImageError(f"{image}: an engine builds without any network; unset sandbox.images.index_mirror or name an image")
                await engine.call(_pull if context is None else _build, engine.api, image, context)
                await engine.call(engine.api.inspect_image, image)
            except SandboxError as error:
                log.warning("%s", error)
                failed[image] = str(error)

    async with asyncio.TaskGroup() as group:
        for image, context in images.items():
            group.create_task(one(image, context))
    return failed


def _pull(api: Any, image: str, _: None) -> None:
    _follow(api.pull(image, stream=True, decode=True), f"image {image} cannot be pulled")


def _build(api: Any, image: str, context: Path) -> None:
    """No step has a network: what a build would fetch has to be in the image that it starts from."""
    steps = api.build(path=str(context), tag=image, network_mode="none", rm=True, forcerm=True, decode=True)
    _follow(steps, f"the Dockerfile of {context.parent.name} cannot be built")


def _follow(lines: Iterator[dict[str, Any]], what: str) -> None:
    """Raise ImageError for the error that the engine tells in its progress, with the step that it belongs to."""
    step = ""
    for line in lines:
        if str(line.get("stream", "")).startswith("Step "):
            step = f" ({line['stream'].strip()})"
        if "error" in line:
            raise ImageError(f"{what}: {str(line['error']).strip()[-500:]}{step}")


def copy_out(api: Any, image: str, path: str, target: Path) -> None:
    """Blocks. Files keep mode and time, links are copied as links. Raises ImageError where the image has no such directory."""
    container = api.create_container(image, ["/nothing"], network_disabled=True)["Id"]
    try:
        target.mkdir()
        with archives.opened(api, container, path, _TREE_MAX, f"{path} of image {image}") as tar:
            first = tar.next()
            if first is None or not first.isdir():
                raise ImageError(f"the image has no directory {path}: set `workdir` in [environment] of the task's task.toml to its place")
            for member, name in archives.below(tar):
                if name and (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    member.name = name
                    member.linkname = member.linkname.partition("/")[2] if member.islnk() else member.linkname
                    tar.extract(member, target, filter=_kept)
    except BaseException:  # whatever it is, half a tree must not be taken for one
        shutil.rmtree(target, ignore_errors=True)
        raise
    finally:
        collect.remove(api, container)


def _kept(member: tarfile.TarInfo, directory: str) -> tarfile.TarInfo:
    """Nothing is written outside, and no name is given to a file outside. Symbolic links may lead anywhere: nobody on this machine follows
    them."""
    kept = tarfile.tar_filter(member, directory)
    if member.islnk():
        tarfile.tar_filter(member.replace(name=member.linkname, deep=False), directory)
    kept.uid, kept.gid, kept.uname, kept.gname = os.getuid(), os.getgid(), "", ""
    return kept
