from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.trainer.replay.made import chat, system, user, write
from trainer.cli import main

DONE = chat([system(), user("fix it")], say="done")


def test_one_object_per_file(tmp_path: Path) -> None:
    path = write(tmp_path, DONE)
    run = CliRunner().invoke(main, ["replay", str(path.parent), "--json", "--rule", "parent_exact"])
    assert run.exit_code == 0, run.output
    assert [json.loads(line) for line in run.stdout.splitlines()] == [
        {
            "file": "made/recording", "exchanges": 1, "skipped": 0, "threads": 1, "branches": 1, "reasons": {"root": 1},
            "classes": {"policy": 1}, "policy_turns": 1, "undelivered": 0, "sampled_tokens": 5, "trained_tokens": 5, "violations": [],
        }
    ]  # fmt: skip


def test_a_broken_file_is_named_and_the_others_are_played(tmp_path: Path) -> None:
    path = write(tmp_path, DONE)
    (path.parent / "broken.jsonl").write_text("{")
    run = CliRunner().invoke(main, ["replay", str(path.parent)])
    assert run.exit_code == 1
    assert "broken.jsonl:1 is no recorded exchange" in run.stderr
    assert run.stdout.startswith("made/recording: 1 exchanges (0 skipped), 1 threads, 1 branches (1 root), 1 policy turns (0 undelivered)")


def test_a_promise_that_does_not_hold_is_a_violation(tmp_path: Path) -> None:
    """A request that no proxy can read was answered when it was recorded."""
    path = write(tmp_path, chat([{"role": "alien", "content": "?"}], say="done"))
    run = CliRunner().invoke(main, ["replay", str(path)])
    assert run.exit_code == 1
    assert "violation: exchange 1: BadAnswer status 400" in run.stdout


@pytest.mark.parametrize("content", [None, "x.txt"])
def test_a_folder_without_recordings_is_refused(content: str | None, tmp_path: Path) -> None:
    if content:
        (tmp_path / content).write_text("")
    run = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert run.exit_code == 1
    assert "holds none: expected .jsonl files" in run.stderr
