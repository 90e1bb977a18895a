"""What a backend's stream offers."""

from __future__ import annotations

from typing import Protocol


class Stream(Protocol):
    """Standard input and output of a process in a sandbox. Every method raises SandboxLost when the way there is broken."""

    @property
    def errors(self) -> bytes:
        """The last few KB that the process wrote to its standard error."""
        ...

    async def send(self, data: bytes) -> None:
        """Write all of `data`; safe to call from several tasks at once."""
        ...

    async def receive(self) -> bytes:
        """Some bytes, in order, or b"" when the process has closed its standard output."""
        ...

    async def close(self) -> None:
        """Both directions; what the process does then is its own affair."""
        ...


class Reader:
    """Whole messages from a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._data = bytearray()

    async def exactly(self, count: int) -> bytes | None:
        """`count` bytes, or None when the stream ended before."""
        while len(self._data) < count:
            block = await self._stream.receive()
            if not block:
                return None
            self._data += block
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken

    async def rest(self, most: int) -> bytes:
        """What is there already, and a little of what is not."""
        if len(self._data) < most:
            self._data += await self._stream.receive()
        return bytes(self._data[:most])
