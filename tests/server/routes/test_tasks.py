from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from server.db.models import PlanRow, Run
from server.schemas.states import RunState
from server.schemas.tasks_record import TaskRecord


@pytest.fixture
def stored_run(client: TestClient) -> str:
    with client.app.state.context.db.write() as session:  # type: ignore[attr-defined]
        session.add(PlanRow(digest="p", spec={}, provenance={}, summary="", created=0))
        session.flush()
        session.add(Run(run_id="of-tasks", name="n", digest="p", state=RunState.CREATED, token_sha256="", steps_expected=1, created=1))
    return "of-tasks"


def test_tasks_with_failures_are_listed_with_causes_and_examples(client: TestClient, stored_run: str, report: Callable[..., int]) -> None:
    bodies: list[dict[str, Any]] = []
    for task, causes in {"good": [None, None], "bad": ["verifier", "verifier", "verifier", "image", None]}.items():
        group = {"type": "group", "group_id": task, "step": 1, "phase": "train", "task": task, "harness": "h", "size": len(causes)}
        bodies.append(group)
        for sample, cause in enumerate(causes):
            trial = f"{task}-{sample}"
            bodies.append({"type": "trial", "trial_id": trial, "state": "queued", "stage": "queued", "group_id": task, "sample": sample})
            failed = {"kind": "failed", "stage": "verifier", "cause": cause, "detail": f"why {sample}"}
            scored = {"kind": "scored", "reward": 1, "termination": "completed"}
            bodies.append({"type": "outcome", "trial_id": trial, "outcome": failed if cause else scored})
    report(stored_run, bodies)
    (bad,) = [TaskRecord.model_validate(row) for row in client.get("/api/tasks", params={"run": stored_run}).json()]
    assert (bad.task, bad.trials, bad.failed) == ("bad", 5, {"verifier": 3, "image": 1})
    assert len(bad.examples) == 4 and {example.run_id for example in bad.examples} == {stored_run}
    assert client.get("/api/tasks", params={"run": "none"}).json() == []
