"""Reading what an agent left, from an engine that has troubles of its own."""

from __future__ import annotations

import io
import json
import tarfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from sandbox.environments.archive import Change
from sandbox.environments.docker import collect
from sandbox.environments.docker.engine import _client, boundary
from sandbox.environments.errors import SandboxError, SandboxLost


def tree() -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, data in (("w", None), ("w/new.txt", b"made")):
            info = tarfile.TarInfo(name)
            info.type, info.mode = (tarfile.REGTYPE, 0o644) if data is not None else (tarfile.DIRTYPE, 0o755)
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return output.getvalue()


@contextmanager
def engine(failures: int, pings: int) -> Iterator[str]:
    """Answers archives behind `failures` errors of its own, and goes away after `pings`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal failures, pings
            if self.path.endswith("/_ping"):
                pings -= 1
                if pings < 0:
                    self.connection.close()
                    return
                self.reply(200, b"OK")
            elif failures:
                failures -= 1
                self.reply(500, json.dumps({"message": "write /var/lib/docker/tmp: no space left on device"}).encode())
            else:
                self.reply(200, tree())

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("X-Docker-Container-Path-Stat", b64encode(b'{"name":"w"}').decode())
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def left(url: str, pristine: Path) -> list[Change]:
    with boundary(url):
        return collect.changes(_client(url, "1.41", False, 10), "c", "/w", pristine, 1 << 20)


def test_an_engine_that_failed_once_blames_no_agent(tmp_path: Path) -> None:
    with engine(failures=1, pings=1) as url:
        assert [(change.path, change.data) for change in left(url, tmp_path)] == [("new.txt", b"made")]


def test_a_tree_that_a_sound_engine_cannot_pack_is_the_agents_doing(tmp_path: Path) -> None:
    with engine(failures=2, pings=1) as url, pytest.raises(SandboxError, match="no space left") as caught:
        left(url, tmp_path)
    assert not isinstance(caught.value, SandboxLost)


def test_an_engine_that_goes_away_meanwhile_is_lost(tmp_path: Path) -> None:
    with engine(failures=1, pings=0) as url, pytest.raises(SandboxLost, match="cannot be reached"):
        left(url, tmp_path)
