"""Purging an index: what goes and why, nothing without --apply, all of it undone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sandbox.cli import main
from sandbox.purge.purge import PurgeError, apply, broken, plan, read, undo
from sandbox.tasks.onebug import generate
from sandbox.tasks.prepare import prepare
from server.db import Database
from server.db.models import PlanRow, Run
from server.events import ingest
from server.schemas.datadir import DataDir
from server.schemas.events import Event
from server.schemas.outcome import Cause
from server.schemas.runspec import Data
from server.schemas.states import RunState
from server.schemas.tasks import TRAIN
from server.schemas.tasks_record import TaskRecord, TaskTrial
from tests.support.quick_server import quick_server


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for task in generate(0, 6, False):
        task.write(tmp_path / "tasks" / task.name)
    return tmp_path / "tasks"


def record(task: str, trials: int, **failed: int) -> TaskRecord:
    counts = {Cause(cause): count for cause, count in failed.items()}
    examples = [TaskTrial(run_id="r", trial_id=f"{task}-{cause}", cause=cause, detail="why") for cause in counts]
    return TaskRecord(task=task, trials=trials, failed=counts, examples=examples)


def names(lines: list[str]) -> list[str]:
    return [json.loads(line)["task"] for line in lines]


def test_only_what_a_task_can_bring_about_counts_against_it() -> None:
    assert broken(record("t", 8, verifier=8), 4, 1.0) == "8 of 8 trials failed: verifier 8"
    assert broken(record("t", 8, image=5, verifier_timeout=3), 4, 1.0)
    assert not broken(record("t", 8, verifier=7), 4, 1.0) and broken(record("t", 8, verifier=7), 4, 0.8)
    assert not broken(record("t", 3, verifier=3), 4, 1.0)
    for cause in set(Cause) - {Cause.IMAGE, Cause.SANDBOX_SETUP, Cause.VERIFIER, Cause.VERIFIER_TIMEOUT}:
        assert not broken(record("t", 8, **{cause: 8}), 4, 1.0)


@pytest.mark.parametrize("has_index", [False, True])
def test_what_was_purged_is_not_used_any_more_and_comes_back(tasks: Path, tmp_path: Path, has_index: bool) -> None:
    lines = read(tasks)
    if has_index:
        (tasks / "index.jsonl").write_text("".join(f"{line}\n" for line in reversed(lines)))
        lines = read(tasks)
    before = (tasks / "index.jsonl").read_bytes() if has_index else None
    bad = names(lines)[1], names(lines)[4]
    manifest = plan(tasks, lines, {task: record(task, 5, verifier=5) for task in bad}, 4, 1.0)
    assert ((tasks / "index.jsonl").read_bytes() if has_index else None) == before  # a plan writes nothing
    assert [entry.at for entry in manifest.removed] == [1, 4] and manifest.removed[0].evidence[0].detail == "why"

    apply(manifest, lines)
    assert names(read(tasks)) == [name for name in names(lines) if name not in bad]
    used = prepare(Data(train=tasks), tmp_path / "run")[TRAIN]
    assert {entry.task for entry in used} == set(names(lines)) - set(bad)
    assert plan(tasks, read(tasks), {task: record(task, 5, verifier=5) for task in bad}, 4, 1.0).removed == []
    with pytest.raises(PurgeError, match="changed meanwhile"):
        apply(manifest, lines)

    undo(manifest.path)
    undo(manifest.path)
    assert ((tasks / "index.jsonl").read_bytes() if has_index else None) == before
    assert read(tasks) == lines


def test_a_purge_is_undone_without_the_kept_file_and_never_over_other_work(tasks: Path) -> None:
    lines = read(tasks)
    (tasks / "index.jsonl").write_text("".join(f"{line}\n" for line in lines))
    manifest = plan(tasks, lines, {names(lines)[0]: record("x", 5, image=5)}, 4, 1.0)
    apply(manifest, lines)
    assert manifest.kept is not None
    manifest.kept.unlink()
    undo(manifest.path)
    assert read(tasks) == lines
    apply(plan(tasks, lines, {names(lines)[0]: record("x", 5, image=5)}, 4, 1.0), lines)
    (tasks / "index.jsonl").write_text(lines[2] + "\n")
    with pytest.raises(PurgeError, match="no longer what the purge wrote"):
        undo(manifest.path)


def test_without_a_server_or_an_index_it_says_what_to_do(tasks: Path, tmp_path: Path) -> None:
    asked = ["purge", str(tasks), "--data-dir", str(tmp_path / "none")]
    assert "rl up" in CliRunner().invoke(main, asked).output
    (tmp_path / "odd.jsonl").write_text("{}\n")
    told = CliRunner().invoke(main, ["purge", str(tmp_path / "odd.jsonl")]).output
    assert "is no index of tasks: task 1 of it: Field required (task)" in told and "pydantic" not in told
    (tmp_path / "program").write_bytes(b"\x7fELF\xd0\n")
    assert "is no index of tasks" in CliRunner().invoke(main, ["purge", str(tmp_path / "program")]).output
    assert "is no manifest" in CliRunner().invoke(main, ["purge", "--undo", str(tmp_path / "odd.jsonl")]).output


@pytest.mark.slow
def test_over_a_real_server(tasks: Path, tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    lines = read(tasks)
    bad = names(lines)[2]
    db = Database(f"sqlite:///{data.database}")
    data.root.mkdir()
    db.migrate()
    with db.write() as session:
        session.add(PlanRow(digest="p", spec={}, provenance={}, summary="", created=0))
        session.flush()
        session.add(Run(run_id="r", name="r", digest="p", state=RunState.CREATED, token_sha256="", steps_expected=1, created=1))
    bodies: list[dict[str, object]] = []
    for task in names(lines):
        bodies.append({"type": "group", "group_id": task, "step": 1, "phase": "train", "task": task, "harness": "h", "size": 4})
        for sample in range(4):
            trial = f"{task}-{sample}"
            bodies.append({"type": "trial", "trial_id": trial, "state": "queued", "stage": "queued", "group_id": task, "sample": sample})
            failed = {"kind": "failed", "stage": "verifier", "cause": "verifier", "detail": "no tests"}
            scored = {"kind": "scored", "reward": 0, "termination": "completed"}
            bodies.append({"type": "outcome", "trial_id": trial, "outcome": failed if task == bad else scored})
    events = [Event.model_validate({"source": "trainer", "seq": n, "time": n, "body": body}) for n, body in enumerate(bodies, 1)]
    ingest(db, "r", events)
    db.close()
    with quick_server(data):
        asked = ["purge", str(tasks), "--data-dir", str(data.root)]
        dry = CliRunner().invoke(main, asked)
        assert f"{bad}: 4 of 4 trials failed: verifier 4" in dry.output and "1 of 6 tasks would go" in dry.output
        assert not (tasks / "index.jsonl").exists()
        applied = CliRunner().invoke(main, [*asked, "--apply"])
        assert applied.exit_code == 0 and bad not in names(read(tasks))
        assert "0 failed trials on 0 of its 5 tasks in all runs" in CliRunner().invoke(main, asked).output
        assert "there is no run nope" in CliRunner().invoke(main, [*asked, "--run", "nope"]).output
    (manifest,) = tasks.glob("*.purged.json")
    assert CliRunner().invoke(main, ["purge", "--undo", str(manifest)]).exit_code == 0
    assert read(tasks) == lines
