from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from server.checks.gather import gather, pinned
from server.checks.rooms import Rooms
from server.db.models import CheckRow
from server.schemas.api import CheckJob
from server.schemas.checks import CheckReport, Level
from server.settings import Settings
from server.spec import resolve

from ..waiting import until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A machine without trainer and sandbox."""
    return Settings(data_dir=tmp_path, trainer_python=tmp_path / "no-python", sandbox_python=tmp_path / "no-python")


def report_of(client: TestClient, request: dict[str, object]) -> CheckReport:
    job = CheckJob.model_validate(client.post("/api/checks", json=request).json())

    def report() -> CheckReport | None:
        return CheckJob.model_validate(client.get(f"/api/checks/{job.check_id}", params={"wait": 5}).json()).report

    found = until(report)
    assert isinstance(found, CheckReport)
    return found


def test_a_check_is_a_job_whose_report_names_each_missing_room_and_what_installs_it(client: TestClient) -> None:
    report = report_of(client, {"document": {"extends": "local"}, "skip_slow": True})
    assert not report.ok
    errors = {check.code: check for check in report.checks if check.level is Level.ERROR}
    assert "uv sync --extra trainer" in errors["trainer"].fix
    assert "uv sync --extra sandbox" in errors["sandbox"].fix
    assert report.summary.startswith(f"{len(report.checks)} checks: ")
    assert {check.code for check in report.checks if check.level is Level.OK} >= {"spec", "ports", "disk"}


def test_a_wrong_spec_is_a_report_with_one_check_per_problem(client: TestClient) -> None:
    report = report_of(client, {"document": {"extends": "local", "trainr": 1, "daat": 2}})
    assert [(check.where, check.fix) for check in report.checks] == [
        ("trainr", "did you mean `trainer`?"),
        ("daat", "did you mean `data`?"),
    ]


def test_checks_of_a_server_that_is_gone_are_ended(client: TestClient) -> None:
    context = client.app.state.context  # type: ignore[attr-defined]
    with context.db.write() as session:
        session.add(CheckRow(check_id="old", request={}, created=0))
    context.checks.recover()
    assert client.get("/api/checks/old").json()["report"]["checks"][0]["fix"] == "run them again"
    assert client.get("/api/checks/none").status_code == 404


def test_the_rooms_of_this_environment_answer(tmp_path: Path) -> None:
    """Against the real interpreters: what is installed here is what the package's metadata pins."""
    pytest.importorskip("renderers")
    facts = gather(Settings(data_dir=tmp_path), resolve({"extends": "local"}).spec, Rooms(), skip_slow=True)
    assert pinned()["trainer"]["verl"] == "0.9.1"
    assert (facts.trainer.problem, dict(facts.trainer.versions)) == ("", pinned()["trainer"])
    assert facts.model is not None
    assert facts.model.value is not None, facts.model.problem
    assert facts.selftest is None
    assert facts.memory_mb > 0


def test_a_room_has_a_deadline_and_leaves_no_process() -> None:
    rooms = Rooms()
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert rooms.ask(dict, [sys.executable, "-c", sleeper], timeout_s=0.5).problem == "no answer within 0.5 s"
    assert rooms.ask(dict, [sys.executable, "-c", "raise SystemExit('no room')"], timeout_s=120).problem == "no room"
    assert rooms.ask(dict, [sys.executable, "-c", "print('soup')"], timeout_s=120).problem.startswith("an answer that is not understood")
    assert rooms.ask(dict[str, int], [sys.executable, "-c", f"print('noise'); print({json.dumps(json.dumps({'a': 1}))})"], 30).value == {
        "a": 1
    }


def test_an_ending_server_does_not_wait_for_its_checks() -> None:
    rooms = Rooms()
    rooms.close()
    assert rooms.ask(dict, [sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=600).problem == "the server is ending"
