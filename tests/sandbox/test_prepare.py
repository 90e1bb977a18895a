"""Task directories of a run: written whole, indexed last, refused with a reason."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from sandbox.cli import main
from sandbox.tasks.lean import full_task, lean_twin
from sandbox.tasks.onebug import generate
from sandbox.tasks.prepare import TaskError, check_task, prepare
from server.schemas.runspec import Data
from server.schemas.tasks import HELD_OUT, TRAIN, TaskEntry


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (made,) = generate(1, 1, held_out=False)
    path = tmp_path / "source" / made.name
    made.write(path)
    return path


def test_a_family_is_generated_and_indexed(tmp_path: Path) -> None:
    data = Data(family="onebug", train_tasks=3, held_out_tasks=2)
    entries = prepare(data, tmp_path)
    assert [len(entries[split]) for split in (TRAIN, HELD_OUT)] == [3, 2]
    index = [TaskEntry.model_validate_json(line) for line in (tmp_path / TRAIN / "index.jsonl").read_text().splitlines()]
    assert index == entries[TRAIN]
    for entry in index:
        assert check_task(tmp_path / TRAIN / entry.task) == entry
    assert not list(tmp_path.rglob(".writing-*"))


def test_what_is_prepared_is_taken_as_it_is_and_what_was_interrupted_is_finished(tmp_path: Path) -> None:
    data = Data(family="onebug", train_tasks=3, held_out_tasks=1)
    entries = prepare(data, tmp_path)
    assert prepare(Data(family="onebug", train_tasks=9, held_out_tasks=9), tmp_path) == entries
    broken = tmp_path / TRAIN / entries[TRAIN][1].task
    (tmp_path / TRAIN / "index.jsonl").unlink()
    shutil.move(broken, broken.with_name(f".writing-{broken.name}"))
    shutil.rmtree(broken.with_name(f".writing-{broken.name}") / "tests")
    assert prepare(data, tmp_path) == entries
    check_task(broken)


def test_directories_are_copied_up_to_a_limit(tmp_path: Path, task: Path) -> None:
    shutil.copytree(task, task.with_name("another"))
    entries = prepare(Data(train=task.parent), tmp_path / "tasks")
    assert [entry.task for entry in entries[TRAIN]] == sorted([task.name, "another"]) and entries[HELD_OUT] == []
    assert len(prepare(Data(train=task.parent), tmp_path / "fewer", limit=1)[TRAIN]) == 1


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "environment/workspace", "tests/check.py"])
def test_an_incomplete_task_is_refused(task: Path, missing: str) -> None:
    (task / "environment/Dockerfile").unlink()  # an image could hold the tree
    path = task / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(TaskError, match=f"{missing} is missing"):
        check_task(task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('schema_version = "1.4"\n', "environment_mode"),
        ("not toml", r"task\.toml cannot be read"),
        ('[verifier]\nenvironment_mode = "separate"\n[[steps]]\nname = "a"\n', "steps"),
    ],
)
def test_a_task_that_could_not_be_graded_safely_is_refused(task: Path, text: str, message: str) -> None:
    (task / "task.toml").write_text(text)
    with pytest.raises(TaskError, match=message):
        check_task(task)


def test_no_tasks_and_no_directory_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is not a directory"):
        prepare(Data(train=tmp_path / "none"), tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="holds no task directory"):
        prepare(Data(train=tmp_path / "empty"), tmp_path / "b")


def test_a_lean_twin_names_the_whole_task_by_its_digest(task: Path) -> None:
    twin = lean_twin(task)
    assert full_task(twin) == task and lean_twin(task) == twin
    assert sorted(str(path.relative_to(twin)) for path in twin.rglob("*")) == [
        "environment",
        "instruction.md",
        "task.toml",
        "tests",
        "tests/test.sh",
    ]
    digest = (twin / "tests" / "test.sh").read_text()
    shutil.rmtree(twin)
    (task / "tests" / "check.py").write_text("raise SystemExit(0)\n")
    assert (lean_twin(task) / "tests" / "test.sh").read_text() != digest


def test_the_command_line_makes_and_checks_tasks(tmp_path: Path) -> None:
    run = CliRunner().invoke
    made = run(main, ["tasks", "make", "--n", "2", str(tmp_path / "made")])
    assert made.exit_code == 0
    tasks = sorted(str(path) for path in (tmp_path / "made").iterdir())
    assert run(main, ["tasks", "check", *tasks]).exit_code == 0
    Path(tasks[0], "instruction.md").unlink()
    checked = run(main, ["tasks", "check", *tasks])
    assert checked.exit_code == 1 and "instruction.md is missing" in checked.output


def test_the_command_line_lists_runtimes(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["harness", "list", "--runtimes", str(tmp_path), "--json"])
    rows = json.loads(result.output)
    names = ["mini-swe-agent", "claude-code", "opencode", "openhands", "codex", "terminus-2"]
    assert [row["name"] for row in rows if not row["installed"]] == names
    assert "harness install" in rows[0]["problem"]


def test_to_verify_nothing_is_no_success(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["harness", "verify", "--runtimes", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert (
        "no harness is installed: `rl harness install` does" in result.output
        and "codex 0.171.0 is not installed and left out" in result.output
    )
