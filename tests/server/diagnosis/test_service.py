"""Findings over REST: from reported events to a decision that the next diagnosis knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from server.db import Database
from server.db.models import ReviewRow
from server.diagnosis.service import diagnose, earlier_reviews, store, with_explanation
from server.events import ingest
from server.settings import Settings
from tests.server.events.test_ingest import make_events, make_run

from .test_explain import Endpoint

Report = Callable[..., int]


def failing_step(trials: int = 8) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = [
        {"type": "group", "group_id": "g", "step": 1, "phase": "train", "task": "t", "harness": "mini-swe-agent", "size": trials}
    ]
    for n in range(trials):
        failed = {"kind": "failed", "stage": "sandbox_setup", "cause": "sandbox_setup", "detail": "no space left"}
        outcome = failed if n < 2 else {"kind": "scored", "reward": n % 2, "termination": "completed"}
        bodies.append({"type": "trial", "trial_id": f"x{n}", "state": "queued", "stage": "queued", "group_id": "g", "sample": n})
        bodies.append({"type": "outcome", "trial_id": f"x{n}", "outcome": outcome})
    return bodies


def test_a_finding_is_stored_reviewed_and_remembered(client: TestClient, db: Database, report: Report) -> None:
    run = make_run(db)
    report(run, failing_step())
    diagnosis = client.post(f"/api/runs/{run}/diagnose", json={}).json()
    [finding] = diagnosis["findings"]
    assert finding["title"] == "Trials fail with sandbox_setup" and finding["verdict"] is None
    assert {"id": "run", "text": "2 of 8 trials", "values": {"failed": 2, "trials": 8}} in finding["evidence"]
    reviewed = client.post(f"/api/findings/{finding['id']}/review", json={"verdict": "confirmed", "note": "disk"})
    assert reviewed.status_code == 200, reviewed.text
    again = client.post(f"/api/runs/{run}/diagnose", json={}).json()
    assert [(f["verdict"], f["note"]) for f in again["findings"]] == [("confirmed", "disk")]
    assert client.get(f"/api/runs/{run}/findings").json() == again["findings"]


def test_an_explanation_without_a_model_is_refused(client: TestClient, db: Database, report: Report) -> None:
    run = make_run(db)
    report(run, failing_step())
    answer = client.post(f"/api/runs/{run}/diagnose", json={"explain": True})
    assert answer.status_code == 503 and "--anthropic-key-file" in answer.json()["detail"]


def test_an_explanation_knows_earlier_decisions(settings: Settings, db: Database, tmp_path: Path) -> None:
    endpoint = Endpoint(200, "Of 8 trials 2 failed [run].")
    key = tmp_path / "key"
    key.write_text("k\n")
    configured = settings.model_copy(update={"anthropic_key_file": key, "anthropic_base_url": str(endpoint.client.base_url)})
    run = make_run(db)
    ingest(db, run, make_events("trainer", failing_step()))
    with db.write() as session:
        first = diagnose(session, run)
        store(session, first)
        session.flush()
        session.add(ReviewRow(finding_id=first.findings[0].id, verdict="rejected", note="only once", time=0))
        session.flush()
        reviews = earlier_reviews(session, run)
    explained = with_explanation(configured, first, reviews)
    assert explained.explanation == "Of 8 trials 2 failed [run]."
    assert "Trials fail with sandbox_setup (run r1): rejected, only once" in json.dumps(endpoint.requests[0])


def test_a_run_without_findings_asks_no_model(settings: Settings, db: Database, tmp_path: Path) -> None:
    run = make_run(db)
    with db.read() as session:
        diagnosis = diagnose(session, run)
    configured = settings.model_copy(update={"anthropic_key_file": tmp_path / "absent"})
    assert with_explanation(configured, diagnosis, []).explanation is None


def test_there_is_nothing_to_diagnose_without_a_run(client: TestClient) -> None:
    assert client.post("/api/runs/none/diagnose", json={}).status_code == 404
