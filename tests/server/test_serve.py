"""Starting a server, and everything that can be in its way: one line, exit code 1, nothing left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from server.schemas.datadir import DataDir, ServerFile

from .waiting import until


def command(data_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "server", "--data-dir", str(data_dir), *arguments]


def refused(data_dir: Path, *arguments: str) -> str:
    """What a server that cannot start says."""
    done = subprocess.run(command(data_dir, *arguments), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


@contextmanager
def serving(data_dir: Path) -> Iterator[ServerFile]:
    process = subprocess.Popen(command(data_dir, "--port", "0"))
    try:
        until(DataDir(data_dir).server_file.exists)
        yield ServerFile.model_validate_json(DataDir(data_dir).server_file.read_bytes())
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_server_says_where_it_listens_while_it_does(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "made" / "here")
    with serving(data.root) as server:
        assert psutil.Process(server.pid).create_time() == pytest.approx(server.create_time, abs=1)
        info = httpx.get(f"{server.url}/api/info", trust_env=False, timeout=60).json()
        assert info["data_dir"] == str(data.root)
        assert (data.token.stat().st_mode & 0o777, data.root.stat().st_mode & 0o777) == (0o600, 0o700)
        assert refused(data.root, "--port", "0") == f"error: another server runs on {data.root}: use it, or choose another --data-dir"
        assert data.server_file.exists()
    assert not data.server_file.exists()


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(tmp_path / "data", "--port", port)
    assert line == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port (0: any free one)"
    assert not (tmp_path / "data").exists()


def test_a_data_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(tmp_path / "file" / "data", "--port", "0")
    assert line.startswith(f"error: cannot write to the data directory {tmp_path}/file/data: Not a directory; choose another")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "Permission denied" in refused(tmp_path / "locked", "--port", "0")


def test_a_database_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    line = refused(tmp_path / "data", "--port", "0", "--database-url", "postgresql://me:secret@127.0.0.1:1/x")
    assert line.startswith("error: cannot use the database: ")
    assert "secret" not in line
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_other_machines_are_let_in_only_when_that_is_meant(tmp_path: Path) -> None:
    assert refused(tmp_path / "data", "--host", "0.0.0.0").endswith("add --public if that is meant")  # noqa: S104
    assert refused(tmp_path / "data", "--port", "70000") == "error: port: Input should be less than 65536"
    assert not (tmp_path / "data").exists()


def test_a_token_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    token = tmp_path / "token"
    assert refused(tmp_path, "--port", "0") == f"error: cannot use the token {token}: Is a directory; remove it and a new one is made"


def test_a_database_of_another_kind_is_refused(tmp_path: Path) -> None:
    line = refused(tmp_path / "data", "--port", "0", "--database-url", "mysql://x/y")
    assert line.endswith("--database-url takes postgresql://… or sqlite:///…")
    assert not (tmp_path / "data").exists()
