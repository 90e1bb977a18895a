"""The demo's task family: deterministic, split by name pair, solvable by its oracle and by nothing less."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from sandbox.tasks.onebug import KINDS, OneBug, generate, held_out_pair
from server.schemas.trials import Identifier


def solved(task: OneBug, workspace: Path) -> bool:
    check = workspace.parent / "check.py"
    check.write_text(task.check)
    return subprocess.run([sys.executable, "-I", str(check), str(workspace)], check=False, capture_output=True).returncode == 0


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


def test_the_same_seed_gives_the_same_tasks_and_a_longer_list_extends_it() -> None:
    assert generate(3, 40, held_out=False) == generate(3, 60, held_out=False)[:40]
    assert generate(3, 10, held_out=False) != generate(4, 10, held_out=False)


def test_splits_share_no_file_and_function_pair() -> None:
    pairs = [{(task.file, task.function) for task in generate(1, 800, held_out)} for held_out in (False, True)]
    assert not pairs[0] & pairs[1]
    assert all(held_out_pair(*pair) for pair in pairs[1])


def test_thousands_of_distinct_tasks_with_safe_names() -> None:
    tasks = generate(0, 5000, held_out=False)
    names = [TypeAdapter(Identifier).validate_python(task.name) for task in tasks]
    assert len(set(names)) == len({task.source + task.issue for task in tasks}) == 5000
    assert {task.kind for task in tasks} == set(KINDS)


def test_the_repair_command_gives_the_fixed_file(workspace: Path) -> None:
    for task in generate(5, 60, held_out=False):
        (workspace / task.file).write_text(task.source)
        subprocess.run(["bash", "-c", task.repair], cwd=workspace, check=True)
        assert (workspace / task.file).read_text() == task.fixed


@pytest.mark.parametrize("held_out", [False, True])
def test_oracle_solves_and_doing_nothing_does_not(workspace: Path, held_out: bool) -> None:
    for task in generate(6, 25, held_out):
        (workspace / task.file).write_text(task.source)
        assert not solved(task, workspace)
        (workspace / task.file).write_text(task.fixed)
        assert solved(task, workspace)


def test_every_wrong_value_fails_the_check(workspace: Path) -> None:
    for task in generate(7, 25, held_out=True):
        for expression in task.wrong_expressions:
            (workspace / task.file).write_text(task.fixed.replace(task.expression, expression))
            assert not solved(task, workspace)


def test_values_of_a_kind_differ_on_every_sampled_input_set() -> None:
    rng = random.Random(0)
    for kind in KINDS.values():
        for _ in range(200):
            inputs = [kind.sample(rng) for _ in range(4)]
            results = [json.dumps([value.run(*case) for case in inputs]) for value in kind.values]
            assert all(a != b for a, b in itertools.combinations(results, 2))


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)\n",
        "import sys\nsys.exit(0)\n",
        "print('[0, 0, 0, 0]')\n",
        "import os\nos.kill(os.getppid(), 9)\n",
        "not python",
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n    if 'CASES' in frame.f_globals:\n"
        "        os.write(1, repr([case[1] for case in frame.f_globals['CASES']]).encode())\n        os._exit(0)\n"
        "    frame = frame.f_back\n",
    ],
)
def test_the_check_is_not_fooled_by_the_graded_file(workspace: Path, cheat: str) -> None:
    task = generate(8, 1, held_out=False)[0]
    (workspace / task.file).write_text(cheat + task.source)
    assert not solved(task, workspace)


def test_written_directory_is_a_harbor_task(tmp_path: Path) -> None:
    harbor = pytest.importorskip("harbor.models.task.task")
    task = generate(9, 1, held_out=False)[0]
    task.write(tmp_path / task.name)
    loaded = harbor.Task(tmp_path / task.name)
    assert loaded.instruction == task.issue
    assert loaded.config.environment.workdir == "/workspace"
    assert (tmp_path / task.name / "environment" / "workspace" / task.file).read_text() == task.source


def test_export_writes_what_generate_gives(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    subprocess.run([sys.executable, "-m", "sandbox.tasks.export", "--seed", "2", "--n", "5", "--out", str(out), "--held-out"], check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["name"] for line in lines] == [task.name for task in generate(2, 5, held_out=True)]
    assert lines[0].keys() >= {"file", "source", "fixed", "issue", "kind"}
