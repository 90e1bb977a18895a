"""Starting and stopping the control plane of a data directory on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from server.schemas.datadir import DataDir, ServerFile

from .client import Client, find_server
from .errors import ControlError, ServerAbsent

START_S = 60
STOP_S = 20
POLL_S = 0.1


class Up(NamedTuple):
    client: Client
    started: bool
    """False: the server was already there."""


def server_command(data: DataDir, port: int) -> list[str]:
    """`-P` keeps the caller's directory off the module path: a project may well have a package named `server`."""
    return [sys.executable, "-P", "-m", "server", "--data-dir", str(data.root), "--port", str(port)]


def ensure_server(data: DataDir, port: int = 0) -> Up:
    """The server of the data directory, started and detached when there is none. Port 0: any free one.

    Raises ControlError with the server's own last words when it does not come up.
    """
    client = running(data)
    if client is not None:
        return Up(client, started=False)
    log = _open_log(data)
    start = log.stat().st_size
    with log.open("ab") as output:
        child = subprocess.Popen(
            server_command(data, port), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=data.root
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        client = running(data)
        if client is not None:
            return Up(client, started=True)
        if child.poll() is not None:
            raise ControlError(f"the server did not start: {_last_line(log, start)} (all of it: {log})")
        time.sleep(POLL_S)
    child.terminate()
    raise ControlError(f"the server did not listen within {START_S} s and was stopped: see {log}")


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
        process.wait(STOP_S)
    except psutil.NoSuchProcess:
        raise ServerAbsent(f"no server is running on {data.root} (process {server.pid} has ended)") from None
    except psutil.AccessDenied:
        raise ControlError(f"the server (process {server.pid}) belongs to another user: stop it as that user") from None
    except psutil.TimeoutExpired:
        raise ControlError(f"the server (process {server.pid}) did not end within {STOP_S} s: see {data.server_log}") from None
    return server


def _open_log(data: DataDir) -> Path:
    try:
        data.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(data.server_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        raise ControlError(f"cannot write to the data directory {data.root}: {error.strerror}; choose another with --data-dir") from None
    return data.server_log


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
