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
from threading import Event, Thread

import pytest

from sandbox.environments.archive import Change
from sandbox.environments.docker import archives, collect
from sandbox.environments.docker.engine import _client, boundary
from sandbox.environments.errors import ImageError, SandboxError, SandboxLost


def tree(name: str = "w", member: str = "w/new.txt") -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for entry, data in ((name, None), (member, b"made")):
            info = tarfile.TarInfo(entry)
            info.type, info.mode = (tarfile.REGTYPE, 0o644) if data is not None else (tarfile.DIRTYPE, 0o755)
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return output.getvalue()


Answer = tuple[int, bytes]
SILENCE: Answer = (0, b"")
WHOLE, HALF = (200, tree()), (200, tree()[:512])


def error(words: str, status: int = 500) -> Answer:
    return status, json.dumps({"message": words}).encode()


OURS = (200, tree("etc", "etc/passwd"))
BROKEN = error("write /var/lib/docker/tmp: no space left on device")


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_PAUSE_S", 0)


@contextmanager
def engine(*archives: Answer, ours: Answer | None = OURS) -> Iterator[str]:
    """Answers requests for the work directory with `archives`, the last of them for ever, and those for `/etc/passwd` with `ours`: without
    it the connection ends."""
    left, over = list(archives), Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = ours if "passwd" in self.path else left.pop(0) if len(left) > 1 else left[0]
            if answer is None:
                self.connection.close()
                return
            if answer == SILENCE:
                over.wait()
                return
            status, body = answer
            self.send_response(status)
            self.send_header("X-Docker-Container-Path-Stat", b64encode(b'{"name":"w"}').decode())
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            over.set()
            server.shutdown()
            thread.join()


def left(url: str, pristine: Path, full: bool = False) -> list[Change]:
    with boundary(url):
        return collect.changes(_client(url, "1.41", False, 1), "c", "/w", pristine, 1 << 20, full)


@pytest.mark.parametrize("first", [BROKEN, HALF], ids=["failed", "half"])
def test_an_engine_that_failed_once_blames_no_agent(tmp_path: Path, first: Answer) -> None:
    with engine(first, WHOLE) as url:
        assert [(change.path, change.data) for change in left(url, tmp_path)] == [("new.txt", b"made")]


TREES = {
    "not to be packed": error("lstat /w/x: file name too long"),
    "named like a machine's trouble": error("open /w/input/output error: is dead: permission denied"),
    "never sent": SILENCE,
    "not there": error("Could not find the file /w in container no such image", 404),
    "ends within a header": (200, tree()[:700]),
    "ends between two entries": HALF,
    "ends in words": (200, tree()[:512] + b"lstat /w/new.txt: permission denied".ljust(600, b".")),
}


@pytest.mark.parametrize("answer", TREES.values(), ids=TREES.keys())
def test_a_tree_that_a_sound_engine_cannot_pack_is_the_agents_doing(tmp_path: Path, answer: Answer) -> None:
    with engine(answer) as url, pytest.raises(SandboxError, match="cannot be read") as caught:
        left(url, tmp_path)
    assert not isinstance(caught.value, SandboxLost | ImageError)


ENGINES: dict[str, tuple[Answer, Answer | None]] = {
    "has no room left": (BROKEN, WHOLE),
    "has a broken disk": (error("readdirent /w/d: input/output error"), WHOLE),
    "hands out nothing": (error("lstat /w: permission denied"), error("lstat /etc/passwd: permission denied")),
    "hands out half of everything": (HALF, HALF),
    "has lost the container": (error("No such container: c", 404), error("No such container: c", 404)),
    "goes away meanwhile": (error("context canceled"), None),
}


@pytest.mark.parametrize(("answer", "ours"), ENGINES.values(), ids=ENGINES.keys())
def test_an_engine_in_trouble_blames_no_agent(tmp_path: Path, answer: Answer, ours: Answer | None) -> None:
    with engine(answer, ours=ours) as url, pytest.raises(SandboxLost) as caught:
        left(url, tmp_path)
    assert caught.value.outside


def test_a_container_that_filled_its_own_disk_is_the_agents_doing(tmp_path: Path) -> None:
    with engine(BROKEN, ours=BROKEN) as url, pytest.raises(SandboxError, match="no space left") as caught:
        left(url, tmp_path, full=True)
    assert not isinstance(caught.value, SandboxLost)


@pytest.mark.parametrize("member", ["w/" + "d/" * 300 + "f", "w/d"])
def test_a_tree_without_end_is_not_read_to_its_end(tmp_path: Path, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MOST", 0 if member == "w/d" else 2)
    with engine((200, tree(member=member))) as url, pytest.raises(SandboxError, match=r"more files|nested too deep"):
        left(url, tmp_path)


SAID = {
    "a file that is named so": ("/containers/c/archive", 404, SandboxError),
    "an image": ("/images/no such container/json", 404, ImageError),
    "to make a container": ("/containers/create", 404, ImageError),
    "a container that is gone": ("/containers/c/json", 404, SandboxLost),
    "a container that has ended": ("/containers/c/exec", 409, SandboxLost),
    "a command of one that has ended": ("/exec/e/start", 409, SandboxLost),
    "an engine in trouble": ("/containers/c/exec", 500, SandboxError),
}


@pytest.mark.parametrize(("path", "status", "kind"), SAID.values(), ids=SAID.keys())
def test_what_an_engine_refuses_is_told_by_its_status(path: str, status: int, kind: type[SandboxError]) -> None:
    """The words of all of them hold what would be the sign of another."""
    answer = error("No such container, no such image: it is dead, is not running", status)
    with engine(answer) as url, pytest.raises(SandboxError) as caught, boundary(url):
        api = _client(url, "1.41", False, 1)
        api._raise_for_status(api._get(api._url(path)))
    assert type(caught.value) is kind
