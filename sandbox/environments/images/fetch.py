"""The pass before a run: every image of its tasks fetched or built, a few at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from sandbox.environments.errors import ImageError
from server.schemas.runspec import Images as Settings

from .build import build
from .cache import IN_PLACE, ImageCache
from .programs import find
from .registry import pull

log = logging.getLogger(__name__)


def lacking(settings: Settings) -> list[str]:
    """What a run with these settings needs and this machine has not. Fetching may turn out to need nothing: all may be here."""
    if not settings.build:
        return []
    try:
        find("buildah", "sandbox.images.build")
    except ImageError as error:
        return [str(error)]
    return []


async def fetch_all(cache: ImageCache, images: Mapping[str, Path | None], settings: Settings) -> dict[str, str]:
    """Have all of `images` in the cache; returns why by image for those that cannot be had. A directory holds the image's Dockerfile."""
    slots, pace = asyncio.Semaphore(settings.pulls), asyncio.Lock()
    failed: dict[str, str] = {}

    async def one(image: str, context: Path | None) -> None:
        async with slots:
            try:
                if image.startswith(IN_PLACE):
                    cache.rootfs(image)
                elif await asyncio.to_thread(cache.find, image) is None:
                    async with pace:
                        await asyncio.sleep(settings.pull_pause_s)
                    if context is None:
                        await pull(cache, image)
                    else:
                        built = await build(cache, context, context.parent.name, settings.index_mirror)
                        for leak in await asyncio.to_thread(cache.leaks, built, context.parent):
                            log.warning(
                                "the image of %s gives it away: %s: %s (%s)", context.parent.name, leak.path, leak.detail, leak.kind
                            )
            except (ImageError, OSError) as error:  # the disk is full, for one
                log.warning("%s", error)
                failed[image] = str(error)

    async with asyncio.TaskGroup() as group:
        for image, context in images.items():
            group.create_task(one(image, context))
    return failed
