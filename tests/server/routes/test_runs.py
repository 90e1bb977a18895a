from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from server.schemas.capture import CaptureRecord
from server.settings import Settings


def group(step: int, phase: str = "train", size: int = 8, name: str = "") -> dict[str, Any]:
    group_id = name or f"{phase}{step}"
    return {"type": "group", "group_id": group_id, "step": step, "phase": phase, "task": "task-1", "harness": "mini", "size": size}


def outcome(trial: str, reward: int | None) -> dict[str, Any]:
    scored = {"kind": "scored", "reward": reward, "termination": "completed"}
    failed = {"kind": "failed", "stage": "sandbox_setup", "cause": "sandbox_setup", "detail": "no room", "evidence": ["mount: EPERM"]}
    return {"type": "outcome", "trial_id": trial, "outcome": scored if reward is not None else failed}


def queued(trial: str, group_id: str, sample: int) -> dict[str, Any]:
    return {"type": "trial", "trial_id": trial, "state": "queued", "stage": "queued", "group_id": group_id, "sample": sample}


def capture(trial: str, path: str, content: bytes = b"") -> dict[str, Any]:
    counts = {"turns": 3, "branches": 1, "sampled_tokens": 42, "tool_calls": 2, "malformed_turns": 1}
    return {
        "type": "capture",
        "trial_id": trial,
        "path": path,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    } | counts


def test_a_plan_is_shown_and_kept(client: TestClient) -> None:
    plan = client.post("/api/plans", json={"document": {"extends": "local"}, "overrides": {"trainer.steps": 3}}).json()
    assert plan["expected_trials"] == 3 * 64 + 2 * 128
    assert plan["provenance"]["trainer.steps"] == "override"
    assert "3 steps of 8 tasks × 8 samples" in plan["summary"]
    assert client.get(f"/api/plans/{plan['digest']}").json() == plan
    assert client.get("/api/presets").json() == [
        "local",
        "local-claude-code",
        "local-mixed",
        "megatron",
        "paper-qwen3.5-35b",
        "single-node",
    ]


def test_a_wrong_spec_is_refused_in_one_line(client: TestClient) -> None:
    answer = client.post("/api/plans", json={"document": {"extends": "local", "trainr": {}}})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "unknown key `trainr` (document) (did you mean `trainer`?)"
    assert [check["where"] for check in answer.json()["checks"]] == ["trainr"]
    infer = client.post("/api/plans", json={"document": {"extends": "local", "kind": "infer"}})
    assert infer.json()["detail"] == "runs of kind infer are not there yet (use kind: train or eval)"


def test_a_plan_of_an_evaluation_has_no_steps(client: TestClient) -> None:
    plan = client.post("/api/plans", json={"document": {"extends": "local", "kind": "eval"}}).json()
    assert plan["expected_trials"] == 128
    expected = (
        "Evaluate builtin:onebug-mini-swe-agent inside mini-swe-agent 2.4.6 on the held-out tasks of onebug: 128 trials at temperature 1"
    )
    assert plan["summary"] == f"{expected}, on the CPU."


def test_a_run_starts_only_from_a_plan_that_was_shown(client: TestClient) -> None:
    answer = client.post("/api/runs", json={"digest": "0" * 64})
    assert answer.status_code == 404
    assert client.get("/api/runs").json() == []


def test_the_forming_step_counts_trials_and_names_failures(client: TestClient, run_id: str, report: Callable[..., int]) -> None:
    bodies = [group(1), *(queued(f"t{n}", "train1", n) for n in range(8)), outcome("t0", 1), outcome("t1", None), outcome("t2", 0)]
    assert report(run_id, bodies) == 12
    status = client.get(f"/api/runs/{run_id}").json()
    expected = {"step": 1, "phase": "train", "expected": 64, "done": 3, "failed": 1, "failures": {"sandbox_setup": 1}}
    assert status["forming"] == expected
    assert "step 1: 3/64 trials, 1 failed: sandbox_setup" in status["summary"]
    report(run_id, [{"type": "step", "step": 1, "metrics": {"actor/lr": 0.5}}], first=13)
    status = client.get(f"/api/runs/{run_id}").json()
    assert (status["forming"], status["steps_done"], status["last_metrics"]) == (None, 1, {"actor/lr": 0.5})
    # The failed trial is in neither numerator nor denominator of the curve.
    assert (status["train_reward"][0]["value"], status["train_reward"][0]["n"]) == (0.5, 2)


def test_a_waiting_client_is_answered_when_something_changes(client: TestClient, run_id: str, report: Callable[..., int]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, f"/api/runs/{run_id}", params={"wait": 60})
        step = 0
        while not waiting.done():  # what was stored before the wait began is no change, so one event may not be enough
            step += 1
            report(run_id, [{"type": "step", "step": step, "metrics": {}}], first=step)
            time.sleep(0.1)
    assert 1 <= waiting.result().json()["steps_done"] <= step


def test_the_held_out_rate_counts_failures_as_unsolved_and_has_an_interval(
    client: TestClient, run_id: str, report: Callable[..., int]
) -> None:
    report(run_id, [group(0, "eval"), {"type": "evaluation", "step": 0, "resolved": 8, "executed": 9, "total": 10}])
    (point,) = client.get(f"/api/runs/{run_id}").json()["held_out"]
    assert (point["value"], point["n"]) == (0.8, 10)
    assert (point["low"], point["high"]) == (pytest.approx(0.49016, abs=1e-5), pytest.approx(0.94332, abs=1e-5))


def test_metrics_come_by_key_and_a_number_that_is_none_is_null(client: TestClient, run_id: str, report: Callable[..., int]) -> None:
    report(run_id, [{"type": "step", "step": n, "metrics": {"a": n / 2, "b": 1.0}} for n in (1, 2)])
    # NaN is not JSON; our producers write it all the same.
    nan = b'{"events":[{"source":"trainer","seq":3,"time":1,"body":{"type":"step","step":3,"metrics":{"a":NaN}}}]}'
    assert client.post(f"/api/runs/{run_id}/events", content=nan).json() == {"stored": 3}
    assert client.get(f"/api/runs/{run_id}/metrics", params={"key": "a"}).json() == {"a": [[1, 0.5], [2, 1.0], [3, None]]}
    assert list(client.get(f"/api/runs/{run_id}/metrics").json()) == ["a", "b"]
    assert client.get(f"/api/runs/{run_id}/steps").json()[1]["metrics"] == {"a": 1.0, "b": 1.0}


def test_trials_are_listed_filtered_and_shown_with_their_timings(client: TestClient, run_id: str, report: Callable[..., int]) -> None:
    report(
        run_id,
        [group(1), group(0, "eval"), queued("t0", "train1", 0), queued("t1", "train1", 1), queued("e0", "eval0", 0), outcome("t1", 1)],
    )
    timing = {"type": "stage_timing", "trial_id": "t1", "stage": "agent", "started": 5.0, "finished": 7.5}
    report(run_id, [timing, capture("t1", "captures/t1.json")], source="runner")
    rows = client.get(f"/api/runs/{run_id}/trials").json()
    assert [row["trial_id"] for row in rows] == ["e0", "t0", "t1"]
    assert [row["trial_id"] for row in client.get(f"/api/runs/{run_id}/trials", params={"phase": "train", "state": "queued"}).json()] == [
        "t0"
    ]
    detail = client.get(f"/api/runs/{run_id}/trials/t1").json()
    assert detail["outcome"] == {"kind": "scored", "reward": 1, "termination": "completed", "detail": "", "evidence": []}
    assert detail["timings"] == [{"stage": "agent", "started": 5.0, "finished": 7.5}]
    assert (detail["turns"], detail["sampled_tokens"], detail["capture"]["malformed_turns"]) == (3, 42, 1)
    assert client.get(f"/api/runs/{run_id}/trials/none").status_code == 404


def test_a_capture_is_read_from_the_runs_directory_and_from_nowhere_else(
    client: TestClient, run_id: str, report: Callable[..., int], settings: Settings
) -> None:
    record = CaptureRecord(trial_id="t0", harness="mini", turns=[], branches=[], sampled_tokens=0)
    raw, kept = record.model_dump_json().encode(), settings.data.runs / run_id / "captures" / "t0.json"
    kept.write_bytes(raw)
    (settings.data_dir / "secret.json").write_text(record.model_dump_json())
    (settings.data.runs / run_id / "captures" / "link.json").symlink_to(settings.data_dir / "secret.json")
    paths = ["captures/t0.npz", "../../secret.json", str(settings.data_dir / "secret.json"), "captures/link.json", "captures/none.json"]
    report(run_id, [capture(f"t{n}", path, raw) for n, path in enumerate(paths)])
    answers = [client.get(f"/api/runs/{run_id}/trials/t{n}/capture") for n in range(len(paths))]
    assert [answer.status_code for answer in answers] == [200, 404, 404, 404, 404]
    assert answers[0].json() == record.model_dump(mode="json")
    kept.write_bytes(raw.replace(b'"mini"', b'"nimi"'))
    changed = client.get(f"/api/runs/{run_id}/trials/t0/capture")
    assert changed.status_code == 404 and "captures/t0.npz is not the file that was reported for trial t0" in changed.json()["detail"]


def test_logs_are_listed_by_the_record_and_shown_without_secrets(
    client: TestClient, run_id: str, report: Callable[..., int], settings: Settings
) -> None:
    (settings.data.runs / run_id / "logs").mkdir()
    (settings.data.runs / run_id / "logs" / "worker.log").write_text("one\nAuthorization: Bearer abc\n")
    report(run_id, [{"type": "log", "name": "worker", "path": "logs/worker.log"}, {"type": "log", "name": "token", "path": "../../token"}])
    assert client.get(f"/api/runs/{run_id}/logs").json() == [{"name": "worker", "size": 30}]
    assert client.get(f"/api/runs/{run_id}/logs/worker", params={"lines": 1}).json()["lines"] == ["Authorization: Bearer ***"]
    assert client.get(f"/api/runs/{run_id}/logs/token").status_code == 404


def test_a_finding_of_the_run_is_reviewed_by_a_person(client: TestClient, run_id: str, report: Callable[..., int]) -> None:
    report(run_id, [{"type": "finding", "detector": "gate", "title": "Pearson below .99", "step": 1, "evidence": ["step:1"]}])
    (finding,) = client.get(f"/api/runs/{run_id}/findings").json()
    assert (finding["title"], finding["verdict"]) == ("Pearson below .99", None)
    client.post(f"/api/findings/{finding['id']}/review", json={"verdict": "confirmed"})
    client.post(f"/api/findings/{finding['id']}/review", json={"verdict": "rejected", "note": "short replies"})
    (finding,) = client.get(f"/api/runs/{run_id}/findings").json()
    assert (finding["verdict"], finding["note"]) == ("rejected", "short replies")


def test_malformed_events_are_refused_in_one_line(client: TestClient, run_id: str) -> None:
    answer = client.post(f"/api/runs/{run_id}/events", content=b'{"events":[{"source":"trainer","seq":0,"time":1,"body":{"type":"log"}}]}')
    assert answer.status_code == 422
    assert "events.0.seq: Input should be greater than or equal to 1" in answer.json()["detail"]
    assert client.post("/api/runs/nope/events", content=b'{"events":[]}').status_code == 404


def test_what_is_not_there_is_said(client: TestClient) -> None:
    assert client.get("/api/runs/nope").json() == {"detail": "there is no run nope: `rl status` lists the runs"}
    assert client.post("/api/runs/nope/stop").status_code == 404
    assert client.get("/api/plans/nope").status_code == 404


@pytest.mark.parametrize("path", ["events?after=", "trials?offset=", "trials?step="])
def test_a_number_that_no_column_holds_is_refused(client: TestClient, run_id: str, path: str) -> None:
    assert client.get(f"/api/runs/{run_id}/{path}{10**20}").status_code == 422


def test_a_record_that_cannot_be_used_is_said_in_one_line(client: TestClient) -> None:
    db = client.app.state.context.db  # type: ignore[attr-defined]
    with db.write() as session:
        session.execute(sa.text("ALTER TABLE plans RENAME TO gone"))
    answer = client.post("/api/plans", json={"document": {"extends": "local"}})
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith("the record cannot be used: ")
    assert "\n" not in answer.json()["detail"]
