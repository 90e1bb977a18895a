"""The hijacked connection of `exec` as a stream: read by a thread of its own, because every transport of the SDK only blocks."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
from concurrent.futures import CancelledError, Executor
from typing import Any

from sandbox.environments.errors import SandboxLost

_HEADER = 8
_STDERR = 2
_BLOCK = 1 << 16
_BLOCKS = 32
"""Under way from the thread to the loop."""
_ERRORS = 4096


def close_connection(connection: Any) -> None:
    """The SDK's reader and the HTTP response behind it each keep the socket open."""
    for held in (connection, getattr(connection, "_sock", None), getattr(connection, "_response", None)):
        if held is not None:
            with contextlib.suppress(OSError, ValueError):  # the last ones find it closed
                held.close()


class ExecStream:
    """See `streamed.stream.Stream`. `connection` is what the SDK's `exec_start(socket=True)` returns."""

    def __init__(self, connection: Any, pool: Executor) -> None:
        # Over a unix socket or plain TCP the SDK gives a reader around the socket; over TLS the socket, over ssh a channel.
        self._connection = connection
        self._socket = getattr(connection, "_sock", connection)
        self._tls = threading.Lock() if isinstance(self._socket, ssl.SSLSocket) else None
        self._socket.settimeout(None if self._tls is None else 0)
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue(_BLOCKS)
        self._sending = asyncio.Lock()
        self._closed = False
        self._over = False
        self.errors = b""
        self._thread = threading.Thread(target=self._read, name="docker-exec", daemon=True)
        self._thread.start()

    async def send(self, data: bytes) -> None:
        async with self._sending:
            if self._closed:
                raise SandboxLost("the connection to a process of the container is closed")
            try:
                await self._loop.run_in_executor(self._pool, self._send, data)
            except OSError as error:
                raise SandboxLost(f"the connection to a process of the container is gone: {error}") from error

    async def receive(self) -> bytes:
        if self._over:
            return b""
        data = await self._arrived.get()
        self._over = not data
        return data

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
        while self._thread.is_alive():
            self._forget()
            await asyncio.sleep(0.005)
        self._forget()
        self._arrived.put_nowait(b"")  # for who still waits
        close_connection(self._connection)

    def _forget(self) -> None:
        while not self._arrived.empty():
            self._arrived.get_nowait()

    def _read(self) -> None:
        """Thread: take the engine's frames apart. Each has a header: the stream's number, and the length in its last 4 bytes."""
        with contextlib.suppress(OSError, RuntimeError, CancelledError):
            while header := self._exactly(_HEADER):
                left = int.from_bytes(header[4:], "big")
                while left:
                    block = self._receive(min(left, _BLOCK))
                    if not block:
                        left = -1
                        break
                    left -= len(block)
                    if header[0] == _STDERR:
                        self.errors = (self.errors + block)[-_ERRORS:]
                    else:
                        self._pass(block)
                if left < 0:
                    break
        with contextlib.suppress(RuntimeError, CancelledError):
            self._pass(b"")

    def _receive(self, count: int) -> bytes:
        """Thread. A TLS connection is one object for both directions, so neither may block while it holds it."""
        if self._tls is None:
            return bytes(self._socket.recv(count))
        while True:
            with self._tls, contextlib.suppress(ssl.SSLWantReadError):
                return bytes(self._socket.recv(count))
            self._wait(select.POLLIN)

    def _send(self, data: bytes) -> None:
        """In the pool."""
        if self._tls is None:
            self._socket.sendall(data)
            return
        view = memoryview(data)
        while view:
            with self._tls, contextlib.suppress(ssl.SSLWantWriteError):
                view = view[self._socket.send(view) :]
                continue
            self._wait(select.POLLOUT)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            block = self._receive(count - len(data))
            if not block:
                return b""
            data += block
        return data

    def _pass(self, block: bytes) -> None:
        """Hand a block to the loop, and wait until there is room for it."""
        asyncio.run_coroutine_threadsafe(self._arrived.put(block), self._loop).result()
