"""The proxy alone in a process, and the handle that the bench holds on it: commands and replies are lines of JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from trainer.bench.proxy.engine import SocketEngine
from trainer.bench.proxy.traffic import KEY, tokenizer_for
from trainer.capture.capture import Capture
from trainer.engine.base import Sampling
from trainer.proxy.dialects.reader import Reader
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy

MAX_TURNS, CONTEXT = 10_000, 4_000_000
SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


async def main(directory: Path, engine_port: int) -> None:
    """Serve until standard input ends. Prints a line once the proxy listens."""
    engine, rendering = SocketEngine(engine_port), Rendering(tokenizer_for(directory))
    proxy = Proxy(engine, rendering)
    await proxy.start()
    gc.collect()
    gc.freeze()  # as the trainer does: the collector need not look at what stays for good
    host = Host(proxy, engine, rendering)
    async for command in commands():
        print(json.dumps(await host.obey(**command)), flush=True)
    await proxy.stop()
    engine.close()


async def commands() -> AsyncIterator[dict[str, Any]]:
    """What the bench asks for on standard input, until that ends. Says first that this process is ready."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("{}", flush=True)
    while line := await reader.readline():
        yield json.loads(line)


class Host:
    def __init__(self, proxy: Proxy, engine: SocketEngine, rendering: Rendering) -> None:
        self._proxy, self._engine = proxy, engine
        self._sampling = Sampling(1.0, 10_000, rendering.stop_token_ids)

    async def obey(self, op: str, id: str = "", routed: bool = False) -> dict[str, Any]:
        match op:
            case "open":
                if routed:
                    self._engine.routed.add(id)
                return {"url": await self._proxy.open(id, KEY, self._sampling, Limits(MAX_TURNS, CONTEXT), "bench")}
            case "close":
                await self._proxy.close(id)
                return {}
            case "measure":  # a rollout ends with it, and what it held is weighed
                reader = self._proxy._sessions[id].reader
                return _weigh(await self._proxy.close(id), reader)
            case _:
                return usage()


def usage() -> dict[str, Any]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"cpu_s": time.process_time(), "rss_mb": pages * os.sysconf("SC_PAGESIZE") / 1e6}


def _weigh(capture: Capture, reader: Reader) -> dict[str, Any]:
    """Bytes of memory that only this rollout holds, with what its reader remembers; routes apart. And the tokens that it owns."""
    nodes = list(capture.graph.nodes())
    routes = sum(node.routes.nbytes for node in nodes if node.routes is not None)
    return {
        "bytes": _deep_size([capture, reader]) - routes,
        "route_bytes": routes,
        "tokens": sum(len(node.ids) for node in nodes),
        "turns": capture.policy_turns,
        "failed": capture.engine_error or capture.proxy_error or "; ".join(capture.violations),
    }


def _deep_size(root: object) -> int:
    """Every object that can be reached, once. An array that is a view keeps its base alive, so the base is what counts."""
    seen, stack, size = set[int](), [root], 0
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, SHARED):
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        stack.extend([item.base] if isinstance(item, np.ndarray) and item.base is not None else gc.get_referents(item))
    return size


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))
