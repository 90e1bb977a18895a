"""Requests over a SOCK_SEQPACKET socket from asyncio: JSON packets with descriptors, answers matched by id."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import socket
from typing import Any

from sandbox.environments.errors import SandboxError, SandboxLost

from .inside import MAX_PACKET

_CROWDED_TRIES, _CROWDED_S = 100, 0.05


class Call:
    """One request. `started` resolves at the first answer (message, descriptors), `done` at the one that carries a status."""

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        self.number = number
        self.started: asyncio.Future[tuple[dict[str, Any], list[int]]] = loop.create_future()
        self.done: asyncio.Future[int] = loop.create_future()

    def fail(self, error: SandboxError) -> None:
        for future in (self.started, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever does not wait for it is not to be reminded


class Channel:
    """Owns `connection`. `what` names the other end in errors."""

    def __init__(self, connection: socket.socket, what: str) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {0: Call(self._loop, 0)}
        self._next = 1
        self._sending = asyncio.Lock()
        self._open = True
        self._loop.add_reader(connection, self._receive)

    @property
    def closed(self) -> bool:
        return not self._open

    @property
    def hello(self) -> Call:
        """The packet with id 0 that the other end sends by itself."""
        return self._calls[0]

    async def call(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> Call:
        """Send a request. Raises SandboxLost when the other end is gone, SandboxError when the message is too long for a packet."""
        if not self._open:
            raise SandboxLost(f"{self._what} is gone")
        number, self._next = self._next, self._next + 1
        data = json.dumps(message | {"id": number}).encode()
        if len(data) > MAX_PACKET:
            raise SandboxError(f"a request to {self._what} has {len(data)} bytes, more than {MAX_PACKET}: upload large input as a file")
        call = self._calls[number] = Call(self._loop, number)
        async with self._sending:
            await self._send(data, fds)
        return call

    async def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> tuple[dict[str, Any], list[int]]:
        """Send a request that has one answer and return it; an answer that says `error` raises SandboxError."""
        call = await self.call(message, fds)
        return await call.started

    async def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        for attempt in itertools.count():
            try:
                socket.send_fds(self._connection, [data], fds)
            except BlockingIOError:
                writable = self._loop.create_future()
                self._loop.add_writer(self._connection, writable.set_result, None)
                try:
                    await writable
                finally:
                    self._loop.remove_writer(self._connection)
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS and attempt < _CROWDED_TRIES:
                    await asyncio.sleep(_CROWDED_S)  # another process of this user has too many under way; they go when it is killed
                    continue
                self.close()
                raise SandboxLost(f"{self._what} is gone: {error.strerror}") from error
            else:
                return

    def _receive(self) -> None:
        while self._open:
            try:
                data, fds, _, _ = socket.recv_fds(self._connection, MAX_PACKET, 16)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                return
            self._resolve(json.loads(data), fds)

    def _resolve(self, message: dict[str, Any], fds: list[int]) -> None:
        call = self._calls.get(message["id"])
        if call is None or ("status" not in message and call.started.done()):
            for fd in fds:
                os.close(fd)
            return
        if "error" in message:
            error = SandboxError(f"{self._what}: {message['error']}")
            error.errno = message.get("errno")
            call.fail(error)
        elif "status" in message:
            if not call.done.done():
                call.done.set_result(message["status"])
        else:
            call.started.set_result((message, fds))
            if "pid" in message:
                return
        if message["id"]:
            del self._calls[message["id"]]

    def close(self) -> None:
        """Every open call fails with SandboxLost."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._connection)
        self._connection.close()
        for call in self._calls.values():
            call.fail(SandboxLost(f"{self._what} is gone"))
        self._calls.clear()
