"""Starting the processes of the bench: engine, proxy, and whatever is measured against it. All end with the bench."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from trainer.bench.proxy.load import Usage
from trainer.bench.proxy.traffic import Dialect, Traffic, tokenizer_for

LINE_LIMIT = 1 << 20
PATHS: dict[Dialect, str] = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}


class EnginePorts(NamedTuple):
    tokens: int
    http: int


class Handle:
    """The proxy's process, reached by lines of JSON. A `Target` of the load."""

    def __init__(self, process: asyncio.subprocess.Process, path: str) -> None:
        """`path` of the calls, behind the rollout's URL."""
        self._process, self._path, self._turn = process, path, asyncio.Lock()

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        async with self._turn:
            if self._process.stdin is None or self._process.stdout is None:
                raise RuntimeError("the process was started without pipes")
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the proxy's process ended; its last words are above")
        return dict(json.loads(line))

    async def open(self, session: str, routed: bool = False) -> str:
        return str((await self.ask("open", id=session, routed=routed))["url"]) + self._path

    async def close(self, session: str) -> None:
        await self.ask("close", id=session)

    async def usage(self) -> Usage:
        return Usage(**await self.ask("usage"))


@asynccontextmanager
async def child(*argv: str, pipes: bool = True) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ended, gently first, when the block is left."""
    pipe = asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, limit=LINE_LIMIT)
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None and not pipes:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


def prepare(directory: Path, traffic: Traffic, model: Path | None) -> None:
    """Write the tokenizer and the engine's answers where the processes find them."""
    if model is None:
        traffic.tokenizer().save(str(directory / "tokenizer.json"))
    else:
        (directory / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    tokenizer = tokenizer_for(directory)
    answers = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in traffic.answers()]
    (directory / "answers.json").write_text(json.dumps(answers))


@asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[EnginePorts]:
    async with child(sys.executable, "-m", "trainer.bench.proxy.engine", str(directory / "answers.json")) as process:
        if process.stdout is None or not (line := await process.stdout.readline()):
            raise RuntimeError("the bench's engine did not start; its last words are above")
        yield EnginePorts(*json.loads(line))


@asynccontextmanager
async def server(module: str, directory: Path, ports: EnginePorts, dialect: Dialect) -> AsyncIterator[Handle]:
    """`host`, which is the proxy, or `floor`."""
    async with child(sys.executable, "-m", f"trainer.bench.proxy.{module}", str(directory), str(ports.tokens)) as process:
        if process.stdout is None or not await process.stdout.readline():
            raise RuntimeError(f"the bench's {module} did not start; its last words are above")
        yield Handle(process, PATHS[dialect])
