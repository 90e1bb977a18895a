"""What an attack finds when it gets out of its sandbox: services and files of the host that all hand out the solution."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path


class Treasure:
    """Laid out anew for every attack, so that whoever opens it is known. Each service answers any connection with the solution."""

    def __init__(self, root: Path, solution: str) -> None:
        self.root = root
        self.marks = root / "marks"
        self._solution = f"{solution}\n".encode()

    @contextlib.asynccontextmanager
    async def laid_out(self) -> AsyncIterator[Laid]:
        """Serve on IPv4, IPv6, and unix sockets by path and by abstract name."""
        self.marks.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o777)
        self.marks.chmod(0o777)
        token = secrets.token_hex(6)
        laid = Laid(self.marks, self._solution)
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0{token}")
        path = self.root / f"{token}.sock"
        async with contextlib.AsyncExitStack() as stack:
            four = await stack.enter_async_context(await asyncio.start_server(laid.hand_out, "127.0.0.1", 0))
            proxy = await stack.enter_async_context(await asyncio.start_server(_proxy, "127.0.0.1", 0))
            await stack.enter_async_context(await asyncio.start_unix_server(laid.hand_out, path))
            await stack.enter_async_context(await asyncio.start_unix_server(laid.hand_out, sock=abstract))
            laid.places |= {"@PORT@": str(four.sockets[0].getsockname()[1]), "@SOCKET@": str(path), "@ABSTRACT@": token, "@PORT6@": "9"}
            with contextlib.suppress(OSError):  # a machine without IPv6
                six = await stack.enter_async_context(await asyncio.start_server(laid.hand_out, "::1", 0))
                laid.places["@PORT6@"] = str(six.sockets[0].getsockname()[1])
            path.chmod(0o777)
            laid.proxy = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
            yield laid
        path.unlink(missing_ok=True)


class Laid:
    """One treasure. `opened` counts connections from anywhere: every one is an escape."""

    def __init__(self, marks: Path, solution: bytes) -> None:
        self.marks = marks
        self.opened = 0
        self.proxy = ""
        """Stands for the rollout's proxy, behind the gate."""
        self.places: dict[str, str] = {}
        self._solution = solution

    def fill(self, script: str, task: Path, name: str) -> str:
        """Put the places into a script."""
        files = {"@TASK@": task, "@SOLUTION@": task / "solution" / "solve.sh", "@MARK@": self.marks / name}
        for word, place in (self.places | {word: str(path) for word, path in files.items()}).items():
            script = script.replace(word, place)
        return script

    async def hand_out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        with contextlib.suppress(ConnectionError):
            writer.write(self._solution)
            await writer.drain()
        writer.close()


async def _proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A proxy that knows nobody."""
    with contextlib.suppress(ConnectionError):
        if await reader.read(65536):
            writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
    writer.close()
