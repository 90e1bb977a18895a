"""A real collector: an HTTP server that takes OTLP's protocol buffers."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from server.app import create_app
from server.schemas.capture import BranchClass, BranchReason, BranchRecord, CaptureRecord, TurnRecord
from server.settings import Settings
from server.telemetry import tracing
from tests.server.routes.test_runs import capture, group, outcome, queued


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.refuse = False
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(
                    gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
                )
                if self.path == "/v1/traces" and not collector.refuse:
                    collector.spans += [span for r in request.resource_spans for s in r.scope_spans for span in s.spans]
                self.send_response(400 if collector.refuse else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def wait(self, count: int) -> list[Span]:
        deadline = time.monotonic() + 60
        while len(self.spans) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()


@pytest.fixture
def settings(tmp_path, database_url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Settings:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(tracing, "INTERVAL_S", 0.1)
    return Settings(data_dir=tmp_path, database_url=database_url, otlp_url=collector.url)


def played(trial: str) -> CaptureRecord:
    branch = BranchRecord(index=0, reason=BranchReason.ROOT, branch_class=BranchClass.POLICY, tokens=9, sampled_tokens=4)
    turn = TurnRecord(index=0, branch=0, prompt_tokens=5, sampled_tokens=4, finish="stop", started=1001.0, finished=1001.5)
    return CaptureRecord(trial_id=trial, harness="mini", turns=[turn], branches=[branch], sampled_tokens=4)


def test_a_finished_trial_becomes_one_trace(
    client: TestClient, settings: Settings, run_id: str, report: Callable[..., int], collector: Collector
) -> None:
    """The trial with the stages that the runner timed and the model calls that the proxy saw, each at its own time."""
    kept = played("t0").model_dump_json()
    (settings.data.runs / run_id / "captures" / "t0.json").write_text(kept)
    timing = {"type": "stage_timing", "trial_id": "t0", "stage": "agent", "started": 1000.5, "finished": 1002.5}
    running = {"type": "trial", "trial_id": "t0", "state": "running", "stage": "agent"}
    captured = capture("t0", "captures/t0.npz", kept.encode())
    report(run_id, [group(1, size=1), queued("t0", "train1", 0), running, timing, outcome("t0", 1), captured])
    spans = {span.name: span for span in collector.wait(3)}
    assert spans.keys() == {"trial", "stage agent", "model call"}
    trial, stage, call = spans["trial"], spans["stage agent"], spans["model call"]
    assert {span.trace_id for span in spans.values()} == {trial.trace_id}
    assert (call.parent_span_id, stage.parent_span_id, trial.parent_span_id) == (stage.span_id, trial.span_id, b"")
    assert (stage.end_time_unix_nano - stage.start_time_unix_nano, call.start_time_unix_nano) == (2_000_000_000, 1_001_000_000_000)
    attributes = {a.key: a.value for a in trial.attributes}
    assert attributes["lego_rl.reward"].int_value == 1 and attributes["lego_rl.trial"].string_value == "t0"
    time.sleep(0.5)
    assert len(collector.spans) == 3, "a trial is sent once"


def test_a_failed_trial_is_an_error_and_a_collector_that_is_away_is_tried_again(
    client: TestClient, run_id: str, report: Callable[..., int], collector: Collector
) -> None:
    collector.refuse = True
    running = {"type": "trial", "trial_id": "t0", "state": "running", "stage": "agent"}
    report(run_id, [group(1, size=1), queued("t0", "train1", 0), running, outcome("t0", None)])
    time.sleep(0.5)
    collector.refuse = False
    (span,) = collector.wait(1)
    assert (span.status.code, span.status.message) == (2, "sandbox_setup: sandbox_setup")


def test_a_restarted_server_does_not_send_old_trials_again(
    client: TestClient, settings: Settings, run_id: str, report: Callable[..., int], collector: Collector
) -> None:
    running = {"type": "trial", "trial_id": "t0", "state": "running", "stage": "agent"}
    report(run_id, [group(1, size=1), queued("t0", "train1", 0), running, outcome("t0", 1)])
    assert len(collector.wait(1)) == 1
    with TestClient(create_app(settings), base_url="http://127.0.0.1"):
        time.sleep(0.5)
    assert len(collector.spans) == 1
