"""Starting and stopping the control plane of a data directory on this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from server.schemas.datadir import DataDir, ServerFile

from .client import Client, find_server
from .errors import ControlError, ServerAbsent

PORT = 8420
START_S = 60
STOP_S = 20
POLL_S = 0.1


class StillStarting(ControlError):
    """The server was started and does not listen yet."""


class Up(NamedTuple):
    client: Client
    started: bool
    """False: the server was already there."""


def server_command(data: DataDir, port: int) -> list[str]:
    """`-P` keeps the caller's directory off the module path: a project may well have a package named `server`."""
    return [sys.executable, "-P", "-m", "server", "--data-dir", str(data.root), "--port", str(port)]


def ensure_server(data: DataDir, port: int | None = None, patience_s: float = START_S) -> Up:
    """The server of the data directory, started and detached when there is none. Port 0: any free one; None: the usual one, if it is free.

    Raises ControlError with the server's own last words when it ends at once (nothing is left behind then), and when it does not
    listen within `patience_s` (it goes on starting).
    """
    client = running(data)
    if client is not None:
        return Up(client, started=False)
    with _start_lock(data) as log:
        client = running(data)
        if client is not None:
            return Up(client, started=False)
        return Up(_start(data, _usual_port(data) if port is None else port, log, patience_s), started=True)


def _start(data: DataDir, port: int, log: Path, patience_s: float) -> Client:
    before = log.stat().st_size
    with log.open("ab") as output:
        child = subprocess.Popen(
            server_command(data, port), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=data.root
        )
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        client = running(data)
        if client is not None:
            return client
        if child.poll() is not None:
            raise ControlError(f"the server did not start: {_last_line(log, before)}")
        time.sleep(POLL_S)
    raise StillStarting(f"the server is still starting after {patience_s:g} s: try again in a moment, or see {log}")


def running(data: DataDir) -> Client | None:
    """A client of the server that runs on the data directory, or None."""
    try:
        client = Client.of(data)
    except ServerAbsent:
        return None
    try:
        client.info()
    except ServerAbsent:
        client.close()
        return None
    return client


def stop_server(data: DataDir) -> ServerFile:
    """Stop the server named by server.json, and only that process. Runs go on; the next server re-attaches to them.

    Raises ServerAbsent when it is not running.
    """
    server = find_server(data)
    try:
        process = psutil.Process(server.pid)
        # A pid may have been given to another process since; its start time cannot.
        if abs(process.create_time() - server.create_time) > 1:
            raise psutil.NoSuchProcess(server.pid)
        process.terminate()
        _await_end(process)
    except psutil.NoSuchProcess:
        raise ServerAbsent(f"no server is running on {data.root} (process {server.pid} has ended)") from None
    except psutil.AccessDenied:
        raise ControlError(f"the server (process {server.pid}) belongs to another user: stop it as that user") from None
    except psutil.TimeoutExpired:
        raise ControlError(f"the server (process {server.pid}) did not end within {STOP_S} s: see {data.server_log}") from None
    return server


def _await_end(process: psutil.Process) -> None:
    """Until the process has ended, at most STOP_S. A zombie has: whoever started it (`rl demo` in another terminal) has not read its exit
    code yet. Raises TimeoutExpired."""
    deadline = time.monotonic() + STOP_S
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                raise psutil.TimeoutExpired(STOP_S, process.pid)
            time.sleep(POLL_S)


def _usual_port(data: DataDir) -> int:
    """Any free one (0) when the usual one is taken; also after a crash, when the server goes back to the port it had."""
    if data.server_file.exists():
        return 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return 0
    return PORT


@contextmanager
def _start_lock(data: DataDir) -> Iterator[Path]:
    """The server's log, locked so that one caller at a time starts a server. What this created goes again when the start fails."""
    made = [directory for directory in (data.root, *data.root.parents) if not directory.exists()]
    fresh = not data.server_log.exists()
    try:
        data.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(data.server_log, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ControlError(f"cannot write to the data directory {data.root}: {error.strerror}; choose another with --data-dir") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield data.server_log
    except StillStarting:
        raise
    except ControlError:
        if fresh:
            data.server_log.unlink(missing_ok=True)
            with suppress(OSError):  # something else lives there by now
                for directory in made:
                    directory.rmdir()
        raise
    finally:
        os.close(fd)


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it said nothing (is the disk full?)"
