"""Regrading over the real pieces: diffs that real trials archived, a real server's record, real grading sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox.integrity.changes import load
from sandbox.regrade.tasks import NoTask, current_task, inputs
from sandbox.runner.trials import Trials
from sandbox.tasks.onebug import generate
from server.db import Database
from server.db.models import PlanRow, Run
from server.launchers.supervisor import record
from server.schemas.datadir import DataDir
from server.schemas.events import GroupBody, OutcomeBody, RunStateBody, TrialBody
from server.schemas.outcome import Scored, Stage
from server.schemas.rundir import RunDir, RunFile, write_atomic
from server.schemas.runspec import Data, RunSpec
from server.schemas.spool import Reporter
from server.schemas.states import Phase, RunState, TrialState
from server.schemas.tasks import TRAIN
from server.security import hash_token
from tests.sandbox.support import needs_sandbox, request, script_room, spec
from tests.support.quick_server import quick_server

TOKEN = "token-of-the-run"
CONFTEST = """cat > conftest.py <<'END'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
END
"""
SCRIPTS = {"solved": "", "idle": "true", "cheat": CONFTEST}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DataDir, str]]:
    """A data directory with a server and a run of three trials on one task with hidden pytest tests; its source has other tests by now."""
    root = tmp_path_factory.mktemp("regrade")
    data, source = DataDir(root / "data"), root / "source"
    run = RunDir(data.runs / "r1")
    for path in (source, run.logs):
        path.mkdir(parents=True)
    _task(source / "adds")
    document = spec().model_dump(mode="json") | {"data": {"train": str(source)}}
    run_spec = RunSpec.model_validate(document)
    _register(data, run_spec)
    with quick_server(data) as client:
        file = RunFile(run_id="r1", server_url=client.url, event_token=TOKEN, runner_token=TOKEN, runtimes=root, spec=run_spec)
        write_atomic(run.run_file, file.model_dump_json())
        asyncio.run(_play(run, client.url, run_spec))
        yield data, client.url


def _task(task: Path) -> None:
    for folder in ("environment/workspace", "tests", "solution"):
        (task / folder).mkdir(parents=True)
    (task / "task.toml").write_text('[environment]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "separate"\n')
    (task / "instruction.md").write_text("Make add add.\n")
    (task / "environment/workspace/calc.py").write_text("def add(a, b):\n    return a - b\n")
    (task / "tests/test_calc.py").write_text("from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    (task / "solution/solve.sh").write_text("sed -i 's/a - b/a + b/' calc.py\n")


def _register(data: DataDir, run_spec: RunSpec) -> None:
    db = Database(f"sqlite:///{data.database}")
    db.migrate()
    now = time.time()
    with db.write() as session:
        session.add(PlanRow(digest="d", spec=run_spec.model_dump(mode="json"), provenance={}, summary="", created=now))
        session.flush()
        run = Run(
            run_id="r1", name="r1", digest="d", state=RunState.STARTING, token_sha256=hash_token(TOKEN), steps_expected=1, created=now
        )
        session.add(run)
    db.close()
    record(RunDir(data.runs / "r1"), os.getpid(), "supervisor")


async def _play(run: RunDir, url: str, run_spec: RunSpec) -> None:
    trainer = Reporter(url, "r1", TOKEN, "trainer", run.spool)
    runner = Reporter(url, "r1", TOKEN, "runner", run.spool)
    trainer.report(RunStateBody(state=RunState.RUNNING))
    trainer.report(GroupBody(group_id="g", step=1, phase=Phase.TRAIN, task="adds", harness="script", size=len(SCRIPTS)))
    async with script_room(run_spec) as room:
        shutil.copytree(room.tasks, run.tasks)
        run.trials.mkdir()
        trials = Trials(room, room.trials.parent, runner)
        for number, (name, script) in enumerate(SCRIPTS.items()):
            trainer.report(TrialBody(trial_id=name, state=TrialState.QUEUED, stage=Stage.QUEUED, group_id="g", sample=number))
            room.launchers["script"].script = script or (room.tasks / TRAIN / "adds/solution/solve.sh").read_text()
            trials.submit(request(room, name, "script"))
            view = await trials.wait(name, 60)
            assert isinstance(view.outcome, Scored), view
            trainer.report(OutcomeBody(trial_id=name, outcome=view.outcome))
        shutil.copytree(room.trials, run.trials, dirs_exist_ok=True)
    for reporter in (trainer, runner):
        assert await asyncio.to_thread(reporter.close, 20)


def regrade(data: DataDir, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "sandbox.cli", "regrade", "r1", "--json", "--data-dir", str(data.root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer | {"exit": done.returncode}


def rewards(url: str) -> dict[str, int | None]:
    rows = httpx.get(f"{url}/api/runs/r1/trials", timeout=60).raise_for_status().json()
    return {row["trial_id"]: row["outcome"].get("reward") for row in rows}


@needs_sandbox
@pytest.mark.slow
def test_archived_work_is_judged_again_and_both_verdicts_are_kept(finished: tuple[DataDir, str]) -> None:
    data, url = finished
    assert rewards(url) == {"solved": 1, "idle": 0, "cheat": 0}
    archives = {row["trial_id"]: row for row in httpx.get(f"{url}/api/runs/r1/archives", timeout=60).json()}
    assert archives.keys() == SCRIPTS.keys()
    diff = [path for _, path, _, _ in load(data.runs / "r1" / archives["solved"]["path"])]
    assert diff == ["calc.py"]  # neither tests nor solution

    again = regrade(data)
    assert (again["exit"], again["graded"], again["agreement"], again["changed"], again["delivered"]) == (0, 3, 1.0, [], True)
    twice = regrade(data)
    assert (twice["graded"], twice["done_before"], twice["regraded"]) == (0, 3, 3)

    # The tests were wrong: today's say that add must multiply, and doing nothing is right.
    (data.root.parent / "source/adds/tests/test_calc.py").write_text(
        "from calc import add\n\n\ndef test_add():\n    assert add(5, 3) == 2\n"
    )
    changed = regrade(data, "--step", "1")
    assert (changed["graded"], changed["compared"], changed["agreed"]) == (3, 3, 0)
    assert {row["trial_id"]: (row["first"]["reward"], row["again"]["reward"]) for row in changed["changed"]} == {
        "solved": (1, 0),
        "idle": (0, 1),
        "cheat": (0, 1),
    }
    assert rewards(url) == {"solved": 1, "idle": 0, "cheat": 0}  # the first verdict stays
    series = httpx.get(f"{url}/runs/r1/series.json", headers={"accept": "application/json"}, timeout=60).json()
    assert series["reward"] == [pytest.approx(1 / 3)] and series["regraded"] == [pytest.approx(2 / 3)]


@needs_sandbox
@pytest.mark.slow
def test_a_shared_verifier_pays_the_cheat_and_counts_for_nothing(finished: tuple[DataDir, str]) -> None:
    data, url = finished
    (data.root.parent / "source/adds/tests/test_calc.py").write_text(
        "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    separate, shared = regrade(data), regrade(data, "--verifier", "shared")
    assert (separate["agreement"], separate["changed"]) == (1.0, [])
    assert {row["trial_id"]: row["again"]["reward"] for row in shared["changed"]} == {"cheat": 1}
    series = httpx.get(f"{url}/runs/r1/series.json", headers={"accept": "application/json"}, timeout=60).json()
    assert series["regraded"] == [pytest.approx(1 / 3)]


@needs_sandbox
@pytest.mark.slow
def test_a_killed_regrade_goes_on_where_it_was(finished: tuple[DataDir, str]) -> None:
    data, _ = finished
    (data.root.parent / "source/adds/tests/test_calc.py").write_text(
        "from calc import add\n\n\ndef test_add():\n    assert add(1, 1) == 2\n"
    )
    spool = data.runs / "r1/spool/regrade.jsonl"
    before = len(spool.read_bytes().splitlines()) if spool.exists() else 0
    command = [sys.executable, "-P", "-m", "sandbox.cli", "regrade", "r1", "--data-dir", str(data.root)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while running.poll() is None and len(spool.read_bytes().splitlines() if spool.exists() else []) <= before:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    rest = regrade(data)
    assert rest["done_before"] >= 1 and rest["graded"] + rest["done_before"] == 3 and rest["problems"] == []
    assert not list((data.runs / "r1/regrade/sandboxes").glob("lego-rl-*"))


@needs_sandbox
@pytest.mark.slow
def test_a_diff_that_was_changed_on_disk_is_not_graded(finished: tuple[DataDir, str]) -> None:
    data, url = finished
    archive = next(row for row in httpx.get(f"{url}/api/runs/r1/archives", timeout=60).json() if row["trial_id"] == "idle")
    path = data.runs / "r1" / archive["path"]
    kept = path.read_bytes()
    path.write_bytes(b"[]  ")
    try:
        answer = regrade(data)
        assert answer["exit"] == 1 and any("SHA-256 differs" in problem for problem in answer["problems"])
    finally:
        path.write_bytes(kept)


def test_a_task_is_graded_with_its_present_tests_and_the_tree_of_the_run(tmp_path: Path) -> None:
    (task,) = generate(0, 1, False)
    for place in ("run", "source"):
        task.write(tmp_path / place / task.name)
    kept = tmp_path / "run" / task.name
    (tmp_path / "source" / task.name / "tests/check.py").write_text("raise SystemExit(1)\n")
    (tmp_path / "source" / task.name / "environment/workspace/new.py").write_text("")
    with_source = current_task(kept, Data(train=tmp_path / "source"), TRAIN, tmp_path / "a")
    without = current_task(kept, Data(family="onebug"), TRAIN, tmp_path / "b")
    assert (with_source / "tests/check.py").read_text() == "raise SystemExit(1)\n"
    assert not (with_source / "environment/workspace/new.py").exists()
    assert (without / "tests/check.py").read_text() == (kept / "tests/check.py").read_text()
    assert inputs(with_source, "x", "separate") != inputs(without, "x", "separate") != inputs(without, "x", "shared")
    with pytest.raises(NoTask):
        current_task(tmp_path / "run/none", Data(family="onebug"), TRAIN, tmp_path / "c")
