"""A real PostgreSQL from the binaries on the machine: own directory, free port, loopback, ended with the session."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

_PATIENCE_S = 120


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yields the URL of the maintenance database. Skips the test, with the reason, where PostgreSQL cannot run."""
    bin_dir = _bin_dir()
    if bin_dir is None:
        pytest.skip("no PostgreSQL server binaries (initdb, postgres) on PATH or under /usr/lib/postgresql")
    user = _unprivileged_user()
    root = Path(tempfile.mkdtemp(prefix="lego-pg-"))
    try:
        if user is not None:
            shutil.chown(root, user)
        _run([bin_dir / "initdb", "-D", root / "db", "-U", "lego", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C"], user, root)
        pg_ctl: list[str | Path] = [bin_dir / "pg_ctl", "-D", root / "db", "-w", "-t", str(_PATIENCE_S), "-l", root / "log"]
        port = _start(pg_ctl, user, root)
        try:
            yield f"postgresql://lego@127.0.0.1:{port}/postgres"
        finally:
            _run([*pg_ctl, "-m", "immediate", "stop"], user, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def new_database(server_url: str) -> str:
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
    return server_url.rpartition("/")[0] + "/" + name


def _bin_dir() -> Path | None:
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if all((place / name).exists() for name in ("initdb", "pg_ctl", "postgres"))), None)


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    users = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in users else "nobody"


def _start(pg_ctl: list[str | Path], user: str | None, root: Path) -> int:
    """The port that it listens on. One that was free may be somebody's by then: it is tried with others before the tests are skipped."""
    for last in (False, False, True):
        port = _free_port()
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories='' -c fsync=off"
        if _run([*pg_ctl, "-o", options, "start"], user, root, needed=last):
            break
    return port


def _run(command: list[str | Path], user: str | None, cwd: Path, needed: bool = True) -> bool:
    done = subprocess.run(command, user=user, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S * 2)
    if done.returncode != 0 and needed:
        pytest.skip(f"PostgreSQL does not run here: {done.stderr.strip()[-300:]}")
    return done.returncode == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
