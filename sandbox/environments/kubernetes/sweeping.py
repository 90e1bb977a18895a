"""Removing what runners that are gone left in the cluster: by label what is ours, by date what is anybody's."""

from __future__ import annotations

import asyncio
import time

from . import manifest
from .api import Api, Object
from .manifest import Owner

_GONE_S = 60
_LOOK_S = 0.2


async def sweep(api: Api, owner: Owner) -> list[str]:
    """Delete every object of `owner`, and those of others whose time is over; return when no pod of `owner` is left. Names what it removed.

    A runner calls it when nothing of its own runs: before its first sandbox and after its last.
    """
    removed = []
    for kind in ("pods", "networkpolicies"):
        there = (await api.listing(kind, manifest.OURS))["items"]
        mine = [item for item in there if item["metadata"]["labels"].get(manifest.OWNER) == owner.name]
        stale = [item for item in there if item not in mine and _is_over(item)]
        if mine:
            await api.delete_all(kind, owner.selector)
        for item in stale:
            await api.delete(kind, item["metadata"]["name"])
        removed += [f"{kind}/{item['metadata']['name']}" for item in (*mine, *stale)]
    end = time.monotonic() + _GONE_S
    while left := (await api.listing("pods", owner.selector))["items"]:
        if time.monotonic() > end:
            for item in left:  # their nodes do not answer
                await api.delete("pods", item["metadata"]["name"], grace_s=0)
            break
        await asyncio.sleep(_LOOK_S)
    return removed


def _is_over(item: Object) -> bool:
    expires = item["metadata"].get("annotations", {}).get(manifest.EXPIRES, "")
    return expires.isdigit() and int(expires) < time.time()
