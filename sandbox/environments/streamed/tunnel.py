"""The gate of a sandbox without any network: connections made in it travel over one stream and are dialled from here, to one address.

There is no interface, route or rule to get around, and none to set up: the sandbox has nothing but `lo`. The other half is
`tunnel_inside.py`, which says how they talk. It runs as the sandbox's `root`; still, nothing that it says makes us keep more than a
window per connection, or dial anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from sandbox.environments.errors import SandboxError, SandboxLost

from .stream import Reader, Stream
from .tunnel_inside import BLOCK, CONNECTIONS, HEAD, WINDOW

GATE_PORT = 8000
PROGRAM = Path(__file__).with_name("tunnel_inside.py")
_OPEN_S = 30
_CLOSE_S = 5


def command(python: str) -> list[str]:
    return [python, "-I", "-S", "-B", "-c", PROGRAM.read_text(encoding="utf-8"), str(GATE_PORT)]


class _Link:
    """One connection. `arrived` is bounded by what the other side may have under way."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.held = 0
        self.credit = WINDOW
        self.more = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Tunnel:
    """Owns the stream."""

    def __init__(self, stream: Stream, host: str, port: int) -> None:
        self._stream = stream
        self._reader = Reader(stream)
        self._target = (host, port)
        self._links: dict[int, _Link] = {}
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Wait until the sandbox can connect; the URL there. Raises SandboxError."""
        try:
            async with asyncio.timeout(_OPEN_S):
                head = await self._reader.exactly(HEAD.size)
        except TimeoutError:
            head = None
        if head is None or HEAD.unpack(head)[0] != b"R":
            await self._stream.close()
            words = self._stream.errors.decode(errors="replace").strip()
            raise SandboxError(f"the gate of the sandbox cannot be opened: {words[-300:] or 'no answer from inside'}")
        self._serving = asyncio.create_task(self._serve())
        return f"http://127.0.0.1:{GATE_PORT}"

    async def close(self) -> None:
        """Cut every connection; on return the sandbox cannot connect any more, unless what runs it is out of reach."""
        if self._serving is None:
            return
        serving, self._serving = self._serving, None
        with contextlib.suppress(TimeoutError, SandboxLost):
            async with asyncio.timeout(_CLOSE_S):
                await self._say(b"Q", 0)
                await asyncio.shield(serving)
        await self._stream.close()
        await serving

    async def _serve(self) -> None:
        try:
            while head := await self._reader.exactly(HEAD.size):
                kind, number, size = HEAD.unpack(head)
                if size > BLOCK or (content := await self._reader.exactly(size)) is None:
                    break
                self._take(kind, number, content)
        except SandboxLost:
            pass
        finally:
            tasks = [link.task for link in self._links.values() if link.task is not None]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await self._stream.close()

    def _take(self, kind: bytes, number: int, content: bytes) -> None:
        link = self._links.get(number)
        if kind == b"O" and link is None and len(self._links) < 2 * CONNECTIONS:
            link = self._links[number] = _Link()
            link.task = asyncio.create_task(self._relay(number, link))
            link.task.add_done_callback(lambda _: self._links.pop(number, None))
        elif link is None or link.task is None:
            return
        elif kind == b"C":
            link.task.cancel()
        elif kind == b"A":
            link.credit = min(WINDOW, link.credit + int.from_bytes(content, "big"))
            link.more.set()
        elif kind in (b"D", b"E"):
            link.held += len(content)
            if link.held > WINDOW or link.arrived.qsize() > WINDOW // 16:
                link.task.cancel()
            else:
                link.arrived.put_nowait(content)

    async def _relay(self, number: int, link: _Link) -> None:
        writer: asyncio.StreamWriter | None = None
        whole = False
        try:
            reader, writer = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._outwards(number, link, writer))
                group.create_task(self._inwards(number, link, reader))
            writer.close()
            whole = True
        except* (OSError, SandboxLost):
            pass
        finally:
            # Whichever side went away, the other learns it at once: a model call without a reader is to be cancelled.
            if writer is not None and not whole:
                writer.transport.abort()
            if not whole:
                with contextlib.suppress(SandboxLost):
                    await self._say(b"C", number)

    async def _outwards(self, number: int, link: _Link, writer: asyncio.StreamWriter) -> None:
        while data := await link.arrived.get():
            writer.write(data)
            await writer.drain()
            link.held -= len(data)
            await self._say(b"A", number, len(data).to_bytes(4, "big"))
        writer.write_eof()

    async def _inwards(self, number: int, link: _Link, reader: asyncio.StreamReader) -> None:
        while True:
            while link.credit <= 0:
                link.more.clear()
                await link.more.wait()
            data = await reader.read(min(BLOCK, link.credit))
            link.credit -= len(data)
            await self._say(b"D" if data else b"E", number, data)
            if not data:
                return

    async def _say(self, kind: bytes, number: int, content: bytes = b"") -> None:
        await self._stream.send(HEAD.pack(kind, number, len(content)) + content)
