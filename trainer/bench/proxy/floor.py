"""A server that passes bodies by: it takes the same requests, makes the same engine calls and answers without looking at either.

What it adds to a direct call is what any Python server on this machine adds, so the rest of a row is the proxy's own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from trainer.bench.proxy.engine import SocketEngine, message
from trainer.bench.proxy.host import commands, usage
from trainer.engine.base import GenerationRequest, Sampling

PROMPT = 20_000


class Floor:
    def __init__(self, engine: SocketEngine, answers: list[dict[str, Any]]) -> None:
        """`answers` hold `text`."""
        self._request = GenerationRequest("floor", np.arange(PROMPT, dtype=np.int32), Sampling(1.0, 10_000, ()))
        usage = {"total_tokens": PROMPT}
        bodies = (json.dumps({"choices": [{"message": message(answer["text"])}], "usage": usage}).encode() for answer in answers)
        self._engine, self._bodies = engine, itertools.cycle(list(bodies))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await self._engine.generate(self._request)
        body = next(self._bodies)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def main(directory: Path, engine_port: int) -> None:
    """Serve until standard input ends. Prints a line once it listens."""
    engine = SocketEngine(engine_port)
    app = Floor(engine, json.loads((directory / "answers.json").read_text()))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", log_config=None, access_log=False, lifespan="off", ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async for command in commands():
        print(json.dumps(usage() if command["op"] == "usage" else {"url": url}), flush=True)
    server.should_exit = True
    await serving
    engine.close()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))
