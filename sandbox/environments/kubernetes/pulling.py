"""Getting images onto the nodes before a run: a few at a time, so that neither a registry nor a node's disk meets a whole run at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

from sandbox.environments.errors import SandboxError

from . import manifest
from .api import ApiError, Object
from .cluster import Cluster
from .pods import Unstartable, ended, obstacle

log = logging.getLogger(__name__)

_PULL_S = 1800


async def pull_all(cluster: Cluster, images: Iterable[str]) -> dict[str, str]:
    """Every image on every node that may run our pods. Returns why by image for those that cannot be had."""
    nodes = await _nodes(cluster)
    slots = asyncio.Semaphore(cluster.settings.pulls)
    pace = asyncio.Lock()
    failures: dict[str, str] = {}

    async def one(image: str, node: str | None) -> None:
        async with slots:
            async with pace:
                await asyncio.sleep(cluster.settings.pull_pause_s)
            try:
                await _pull(cluster, manifest.mirrored(image, cluster.settings.mirrors), node)
            except SandboxError as error:
                failures[image] = str(error)

    async with asyncio.TaskGroup() as group:
        for image in dict.fromkeys(images):
            for node in nodes:
                group.create_task(one(image, node))
    return failures


async def _nodes(cluster: Cluster) -> Sequence[str | None]:
    """Names of the nodes; one nameless one where we may not list them, and the scheduler chooses."""
    selector = ",".join(f"{name}={value}" for name, value in (manifest.MACHINE | cluster.settings.node_selector).items())
    try:
        answer = await cluster.api.request("GET", "/api/v1/nodes", {"labelSelector": selector})
    except ApiError as error:
        log.warning("images are pulled to one node each: %s", error)
        return [None]
    return [node["metadata"]["name"] for node in answer["items"] if not node.get("spec", {}).get("unschedulable")]


async def _pull(cluster: Cluster, image: str, node: str | None) -> None:
    name = cluster.owner.new_name()
    cluster.pods.follow(name)
    try:
        await cluster.api.create("pods", manifest.pull(name, cluster.owner, image, cluster.settings, node))
        await cluster.pods.wait(name, _pulled, _PULL_S)
    except TimeoutError:
        raise SandboxError(f"image {image} was not pulled within {_PULL_S} s") from None
    finally:
        with contextlib.suppress(ApiError):
            await cluster.api.delete("pods", name, grace_s=0)
        cluster.pods.forget(name)


def _pulled(pod: Object | None) -> bool | None:
    """A container that ran, or would if its program existed, has its image."""
    if not pod:
        return None
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if container.get("imageID") or container.get("state", {}).get("running") or container.get("state", {}).get("terminated"):
            return True
    if ended(pod) is None and (found := obstacle(pod)):
        if isinstance(found, Unstartable):
            return True
        raise found
    return None
