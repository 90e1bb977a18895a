"""The producer's side of the event protocol against a real HTTP server."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from server.schemas.events import Event, EventBatch, LogBody
from server.schemas.spool import Reporter


class Sink:
    """Stores events as the control plane does: once per seq. `fail` answers with `failure` that many times, after storing when
    `store_first`."""

    def __init__(self, fail: int = 0, store_first: bool = False, failure: tuple[int, bytes] = (503, b"{}")) -> None:
        self.events: dict[int, str] = {}
        self.tokens: set[str | None] = set()
        self.fail, self.store_first, self.failure = fail, store_first, failure

    def take(self, body: bytes, token: str | None) -> tuple[int, bytes]:
        self.tokens.add(token)
        failing = self.fail > 0
        self.fail -= failing
        if not failing or self.store_first:
            for event in EventBatch.model_validate_json(body).events:
                assert isinstance(event.body, LogBody)
                self.events.setdefault(event.seq, event.body.name)
        return self.failure if failing else (200, json.dumps({"stored": max(self.events)}).encode())


@contextmanager
def listening(sink: Sink) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, answer = sink.take(body, self.headers.get("authorization"))
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def log_event(i: int) -> LogBody:
    return LogBody(name=f"log-{i}", path="logs/x")


PORTAL = 200, b"<html>sign in</html>"


@pytest.mark.parametrize(
    "sink",
    [Sink(), Sink(fail=1), Sink(fail=1, store_first=True), Sink(fail=1, failure=PORTAL)],
    ids=["healthy", "refuses", "answer lost", "somebody else answers"],
)
def test_every_event_arrives_once_and_in_order(tmp_path: Path, sink: Sink) -> None:
    with listening(sink) as url:
        reporter = Reporter(url, "r1", "secret", "trainer", tmp_path)
        for i in range(500):
            reporter.report(log_event(i))
        assert reporter.close(timeout_s=60)
    assert sink.events == {i + 1: f"log-{i}" for i in range(500)}
    assert sink.tokens == {"Bearer secret"}


def test_a_restarted_producer_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    first = Reporter("http://127.0.0.1:9", "r1", "t", "runner", tmp_path)  # nobody listens on the discard port
    first.report(log_event(0))
    first.report(log_event(1))
    assert not first.close(timeout_s=0.1)
    with (tmp_path / "runner.jsonl").open("a") as file:
        file.write('{"source": "runner", "seq": 3, "ti')  # killed in mid-write
    sink = Sink()
    with listening(sink) as url:
        second = Reporter(url, "r1", "t", "runner", tmp_path)
        second.report(log_event(2))
        assert second.close(timeout_s=60)
    assert sink.events == {1: "log-0", 2: "log-1", 3: "log-2"}


def test_reporting_does_not_wait_for_the_server(tmp_path: Path) -> None:
    reporter = Reporter("http://127.0.0.1:9", "r1", "t", "trainer", tmp_path)
    reporter.report(log_event(0))
    assert len((tmp_path / "trainer.jsonl").read_text().splitlines()) == 1
    assert not reporter.close(timeout_s=0.1)


FULL_DISK = """
import resource, sys
from pathlib import Path
from server.schemas.events import LogBody
from server.schemas.spool import Reporter

reporter = Reporter(sys.argv[1], "r1", "token", "trainer", Path(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for n in range(1, 301):
    reporter.report(LogBody(name=f"log-{n}", path="logs/x"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
reporter.report(LogBody(name="log-301", path="logs/x"))
sys.exit(not reporter.close(60))
"""


def test_a_full_disk_fails_no_caller_and_loses_nothing(tmp_path: Path) -> None:
    sink = Sink()
    with listening(sink) as url:
        subprocess.run([sys.executable, "-P", "-c", FULL_DISK, url, tmp_path], check=True, capture_output=True)
    assert sorted(sink.events) == list(range(1, 302))
    lines = (tmp_path / "trainer.jsonl").read_bytes().splitlines()
    assert [Event.model_validate_json(line).seq for line in lines] == list(range(1, 302))
