"""The one-commit view: the same files, nothing else, and the task's own repository back for grading."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from sandbox.integrity.gitview import HISTORY, HistoryError, audit, hide
from sandbox.redteam import targets
from sandbox.runner.drive import Room
from sandbox.runner.outcomes import decide
from sandbox.tasks.prepare import TaskError, prepare
from server.schemas.outcome import Scored
from server.schemas.runspec import Data
from tests.sandbox.support import needs_sandbox, play, script_room

from .test_hidden import spec

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(tree: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(tree), *arguments], env=ENVIRONMENT, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    tree = tmp_path / "task" / "environment" / "workspace"
    tree.mkdir(parents=True)
    (tree / "main.py").write_text("x = 1\n")
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("main.py")
    (tree / "kept.log").write_text("tracked although ignored\n")
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "ünï\n.txt").write_text("a name\n")
    git(tree, "init", "-q", "-b", "trunk", ".")
    git(tree, "add", "-A")
    git(tree, "add", "-f", "kept.log")
    git(tree, "commit", "-qm", "one")
    git(tree, "tag", "v1.0")
    (tree / "other.log").write_text("ignored\n")
    return tmp_path / "task"


def test_the_view_has_the_same_files_and_nothing_else(task: Path) -> None:
    tree = task / "environment" / "workspace"
    before = git(tree, "rev-parse", "HEAD^{tree}")
    assert hide(task)
    assert git(tree, "rev-parse", "HEAD^{tree}") == before
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "log", "--all", "--format=%s|%an|%ad", "--date=short") == "The task's files|task|2000-01-01"
    assert git(tree, "for-each-ref", "--format=%(refname)") == "refs/heads/trunk"
    assert "kept.log" in git(tree, "ls-files") and "other.log" not in git(tree, "ls-files")
    assert git(task / HISTORY, "tag") == "v1.0"
    assert not hide(task)  # twice is once


def test_a_tree_without_a_repository_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "environment" / "workspace").mkdir(parents=True)
    assert not hide(tmp_path)


def test_the_audit_sees_what_was_left(task: Path) -> None:
    hide(task)
    tree = task / "environment" / "workspace"
    audit("t", tree)
    (tree / ".git" / "packed-refs").write_text("")
    with pytest.raises(HistoryError, match="still holds something else"):
        audit("t", tree)
    (tree / ".git" / "packed-refs").unlink()
    git(tree, "hash-object", "-w", "run.sh", "/etc/hostname")
    with pytest.raises(HistoryError, match="still holds something else"):
        audit("t", tree)


def test_what_cannot_be_hidden_is_refused(task: Path, tmp_path: Path) -> None:
    tree = task / "environment" / "workspace"
    for name, text in (("task.toml", '[verifier]\nenvironment_mode = "separate"\n'), ("instruction.md", "x"), ("tests/check.py", "")):
        path = task / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tree / "vendor").mkdir()
    (tree / "vendor" / ".git").write_text("gitdir: ../.git/modules/vendor\n")
    (tmp_path / "given").mkdir()
    task.rename(tmp_path / "given" / "task")
    with pytest.raises(TaskError, match=r"vendor/\.git is a submodule"):
        prepare(Data(train=tmp_path / "given"), tmp_path / "tasks")


@needs_sandbox
def test_the_agent_has_one_commit_and_the_tests_have_the_history(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    names = targets.write(tmp_path / "tasks")
    for name in (names["values"], names["tests"]):
        (tmp_path / "tasks" / name).rename(tmp_path / name)
    hidden = tmp_path / "tasks" / "history" / "tests" / "test_hidden.py"
    hidden.write_text(
        hidden.read_text()
        + "\n\ndef test_version():\n    import subprocess\n"
        + "    assert subprocess.check_output(['git', 'describe', '--tags'], text=True).strip() == 'v1.0'\n"
        + "    assert subprocess.check_output(['git', 'log', '-1', '--format=%s'], text=True).strip() == 'base'\n"
    )
    script = "git describe --tags && exit 1; git -c user.name=a -c user.email=a commit -qam mine --allow-empty; git log --oneline | wc -l"
    script += f"; {targets.FIX}"

    async def main() -> None:
        async with script_room(spec(tmp_path / "tasks")) as room:
            assert isinstance(room, Room)
            facts, _ = await play(room, script)
            outcome = decide(facts)
            assert isinstance(outcome, Scored) and outcome.reward == 1, outcome
            assert (room.trials / "t" / "agent" / "harness.log").read_text().splitlines()[0] == "2"  # the view's commit and its own

    asyncio.run(main())
