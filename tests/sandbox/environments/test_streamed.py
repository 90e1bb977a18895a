"""Commands and the gate over a byte stream, with a plain process of this machine on the other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from sandbox.environments.errors import SandboxError
from sandbox.environments.spec import DEFAULT_ENV
from sandbox.environments.streamed import launch, tunnel
from sandbox.environments.streamed.tunnel_inside import WINDOW


class Pipes:
    """A stream to a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout
        self.errors = b""

    async def send(self, data: bytes) -> None:
        self.stdin.write(data)
        with contextlib.suppress(ConnectionError):
            await self.stdin.drain()

    async def receive(self) -> bytes:
        return await self.stdout.read(65536)

    async def close(self) -> None:
        self.stdin.close()


@contextlib.asynccontextmanager
async def started(command: list[str]) -> AsyncIterator[Pipes]:
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    try:
        yield Pipes(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run(argv: list[str], stdin: bytes = b"", timeout_s: float | None = 30, limit: int = 1 << 20, cut: bool = False) -> launch.Ran:
    ran = launch.Ran()
    request = launch.order(
        argv, env=DEFAULT_ENV, cwd="/", rlimits={"NOFILE": 64}, stdin=len(stdin), timeout_s=timeout_s, limits=(limit, limit), cut=cut
    )
    async with started(launch.command(sys.executable)) as stream:
        await launch.run(stream, request, stdin, timeout_s, (limit, limit), ran)
        await stream.close()
        await stream.process.wait()
    return ran


def test_a_command_its_input_and_its_exact_end() -> None:
    async def main() -> None:
        ran = await run(["sh", "-c", "cat; echo err >&2; ulimit -n; pwd; exit 3"], b"x" * 200_000)
        assert (len(ran.stdout), ran.stdout[-5:], ran.stderr, ran.ended) == (
            200_005,
            b"64\n/\n",
            b"err\n",
            launch.End(3 << 8, False, False),
        )
        assert (await run(["sh", "-c", "head -c 3"], b"x" * 20_000_000)).stdout == b"xxx"
        assert (await run(["sh", "-c", "kill -9 $$"])).ended == launch.End(9, False, False)
        missing = await run(["no-such-program"])
        assert (missing.ended, missing.stderr) == (launch.End(127 << 8, False, False), b"no-such-program: No such file or directory\n")

    asyncio.run(main())


def test_time_output_and_background_processes_are_bounded() -> None:
    async def main() -> None:
        late = await run(["sh", "-c", "echo started; trap '' TERM; sleep 4741.25 & sleep 4741.25"], timeout_s=3)
        assert (late.ended, late.stdout) == (launch.End(9, True, False), b"started\n")
        flood = await run(["sh", "-c", "head -c 5000000 /dev/zero; echo done >&2"], limit=1000)
        assert (len(flood.stdout), flood.stderr, flood.ended) == (1000, b"done\n", launch.End(0, False, True))
        cut = await run(["sh", "-c", "cat /dev/zero"], limit=100_000, cut=True)
        assert (len(cut.stdout), cut.ended) == (100_000, launch.End(9, False, True))
        left = await run(["sh", "-c", "sleep 1 & echo started"])
        assert (left.stdout, left.ended) == (b"started\n", launch.End(0, False, False))

    asyncio.run(main())


def test_a_host_that_goes_away_ends_the_command() -> None:
    async def main() -> None:
        async with started(launch.command(sys.executable)) as stream:
            request = launch.order(
                ["sh", "-c", "echo $$; exec sleep 600"], env=DEFAULT_ENV, cwd="/", rlimits={}, stdin=0, timeout_s=None, limits=(99, 99)
            )
            await stream.send(request)
            pid = int((await stream.receive())[5:])
            await stream.close()
            assert await stream.process.wait() == 0
            for _ in range(6000):
                if not os.path.exists(f"/proc/{pid}"):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("it goes on")

    asyncio.run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"o\xff\xff\xff\xff",
        b"o\x00\x00\x00\x64" + b"x" * 100,
        b"x\x00\x00\x00\x02{}",
        b"x\x00\x00\x00\x04null",
        b"?\x00\x00\x00\x00",
        b"x\x00\x00\x00\x09not json!",
    ],
)
def test_an_end_that_was_not_told_is_none(said: bytes) -> None:
    """The other half may be in an agent's hands."""

    async def main() -> None:
        program = f"import sys; sys.stdout.buffer.write({said!r})"
        ran = launch.Ran()
        async with started([sys.executable, "-c", program]) as stream:
            await launch.run(stream, b"", b"", 30, (50, 50), ran)
        assert (ran.ended, bytes(ran.stdout)) == (None, b"")

    asyncio.run(main())


def test_an_order_that_is_too_long_is_refused() -> None:
    with pytest.raises(SandboxError, match="upload large input as a file"):
        launch.order(["x" * 300_000], env={}, cwd="/", rlimits={}, stdin=0, timeout_s=None, limits=(1, 1))


# ---------------------------------------------------------------- the gate


@contextlib.asynccontextmanager
async def gate(monkeypatch: pytest.MonkeyPatch, answer: object) -> AsyncIterator[tuple[tunnel.Tunnel, int]]:
    """An open gate, and the port where "the sandbox" reaches it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(tunnel, "GATE_PORT", port)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)  # type: ignore[arg-type]
    async with started(tunnel.command(sys.executable)) as stream:
        opened = tunnel.Tunnel(stream, "127.0.0.1", server.sockets[0].getsockname()[1])
        assert await opened.open() == f"http://127.0.0.1:{port}"
        yield opened, port
        await opened.close()
    server.close()


def test_connections_travel_whole_and_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def talk(port: int, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = bytes([number]) * (3 * WINDOW + number)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()

    async def main() -> None:
        async with gate(monkeypatch, echo) as (_, port), asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(talk(port, number))

    asyncio.run(main())


def test_a_reader_that_stalls_holds_no_memory_and_nobody_else_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if await reader.readline() == b"quick\n":
            writer.write(b"answer\n")
            writer.close()
            return
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536

    async def main() -> None:
        async with gate(monkeypatch, flood) as (_, port):
            _, stalled = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            stalled.write(b"slow\n")
            await asyncio.sleep(0.5)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"quick\n")
            assert await reader.readline() == b"answer\n"
            stalled.transport.abort()
        assert sent < 32 << 20

    asyncio.run(main())


def test_closing_cuts_open_connections_and_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()
        writer.close()

    async def main() -> None:
        async with gate(monkeypatch, wait) as (opened, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.readline() == b"hello\n"
            await opened.close()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            async with asyncio.timeout(10):
                await gone.wait()

    asyncio.run(main())


def test_a_gate_that_cannot_listen_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            monkeypatch.setattr(tunnel, "GATE_PORT", taken.getsockname()[1])
            async with started(tunnel.command(sys.executable)) as stream:
                with pytest.raises(SandboxError, match="gate of the sandbox cannot be opened"):
                    await tunnel.Tunnel(stream, "127.0.0.1", 9).open()

    asyncio.run(main())
