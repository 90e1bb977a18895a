import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from plugin.errors import ControlError, ServerAbsent
from plugin.local import ensure_server, stop_server
from server.schemas.datadir import DataDir, ServerFile


def test_two_starts_at_once_are_one_server(empty: DataDir) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ensure_server(empty, port=0), range(2))
    assert first.client.url == second.client.url
    assert sorted((first.started, second.started)) == [False, True]
    pid = stop_server(empty).pid
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(ServerAbsent):
        stop_server(empty)


def test_a_server_whose_starter_lives_on_is_stopped(empty: DataDir) -> None:
    """`rl down` beside a running `rl demo`: the server's parent has not read its exit code, so it stays as a zombie."""
    code = f"""
from pathlib import Path
from plugin.local import ensure_server
from server.schemas.datadir import DataDir
ensure_server(DataDir(Path({str(empty.root)!r})), port=0)
input("up\\n")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == "up\n"
        pid = stop_server(empty).pid
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        starter.communicate("\n")


def test_a_process_with_the_same_pid_is_left_alone(empty: DataDir) -> None:
    """server.json of a server that is long gone, whose pid some other program has now."""
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    empty.root.mkdir()
    stale = ServerFile(url="http://127.0.0.1:9", pid=other.pid, create_time=psutil.Process(other.pid).create_time() - 1000)
    empty.server_file.write_text(stale.model_dump_json())
    with pytest.raises(ServerAbsent):
        stop_server(empty)
    assert other.poll() is None
    other.communicate(b"")


def test_a_taken_port_is_named_and_leaves_nothing(empty: DataDir) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ControlError, match=rf"port {port}: Address already in use.*--port"):
            ensure_server(empty, port)
    assert not empty.root.exists()


def test_a_data_directory_that_cannot_be_written_is_named(empty: DataDir) -> None:
    empty.root.write_text("a file, where a directory should be")
    with pytest.raises(ControlError, match=r"cannot write to the data directory .*--data-dir"):
        ensure_server(empty, port=0)
