"""Removing what runners that are gone left in the cluster: by label what is ours, by date what is anybody's."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

from . import manifest
from .api import Api, Object
from .manifest import Owner

_LOOK_S = 0.5
_LOST_NODE_S = 120
"""A pod that takes longer to end is on a node that does not answer."""


async def sweep(api: Api, owner: Owner, patience_s: float) -> list[str]:
    """Delete every object of `owner`, and those of others whose time is over. Names what it removed.

    A runner calls it when nothing of its own runs: before its first sandbox and after its last. The cluster ends pods on its own; that is
    waited for at most `patience_s`.
    """
    removed = []
    for kind in ("pods", "networkpolicies"):
        there = (await api.listing(kind, manifest.OURS))["items"]
        mine = [item for item in there if item["metadata"]["labels"].get(manifest.OWNER) == owner.name]
        stale = [item for item in there if item not in mine and _is_over(item)]
        if mine:
            await api.delete_all(kind, owner.selector)
        for item in (*mine, *stale):
            if _is_stuck(item):
                await api.delete(kind, item["metadata"]["name"], grace_s=0)
            elif item in stale:
                await api.delete(kind, item["metadata"]["name"])
        removed += [f"{kind}/{item['metadata']['name']}" for item in (*mine, *stale)]
    end = time.monotonic() + patience_s
    while time.monotonic() < end and (await api.listing("pods", owner.selector))["items"]:  # noqa: ASYNC110 -- nothing else runs
        await asyncio.sleep(_LOOK_S)
    return removed


def _is_over(item: Object) -> bool:
    expires = item["metadata"].get("annotations", {}).get(manifest.EXPIRES, "")
    return expires.isdigit() and int(expires) < time.time()


def _is_stuck(item: Object) -> bool:
    asked = item["metadata"].get("deletionTimestamp")
    return asked is not None and (datetime.now(UTC) - datetime.fromisoformat(asked)).total_seconds() > _LOST_NODE_S
