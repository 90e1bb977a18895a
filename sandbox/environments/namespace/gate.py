"""The one way out of a sandbox: a listener in its network namespace, held by the host, relayed to one address of the host.

There is no interface, route or rule to get around: the sandbox has nothing but `lo`. Closing the gate ends all egress at once.
"""

from __future__ import annotations

import asyncio
import socket

MAX_CONNECTIONS = 64


class Gate:
    """Relays every connection on `listener` to `(host, port)`. Owns the listener."""

    def __init__(self, listener: socket.socket, host: str, port: int) -> None:
        self._listener = listener
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self.connections = 0
        """Accepted so far."""
        self.failed = 0
        """Accepted but the target refused."""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listener)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if len(self._relays) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._relay(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        except OSError:
            self.failed += 1
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, upstream_writer))
                group.create_task(_pump(upstream_reader, writer))
        except* ConnectionError:
            # One side is gone for good: the other must learn it at once, a model call without a reader is to be cancelled.
            upstream_writer.transport.abort()
        finally:
            upstream_writer.close()

    async def close(self) -> None:
        """Refuse new connections and cut the open ones."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for task in list(self._relays):
            task.cancel()
        if self._relays:
            await asyncio.wait(self._relays)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of the stream and pass the end on."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
