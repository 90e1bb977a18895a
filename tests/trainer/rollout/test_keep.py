"""What is left of a capture when the disk is full: whole files or none, and a rollout that goes on."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.schemas.capture import CaptureRecord
from server.schemas.rundir import RunDir
from tests.trainer.capture.test_record import capture
from trainer.capture.file import from_bytes
from trainer.rollout.keep import keep


@contextmanager
def disk_takes(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_in(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.captures.mkdir()
    return run


def test_record_and_file_lie_side_by_side(tmp_path: Path) -> None:
    run, made = run_in(tmp_path), capture(moe=True)
    body, problem = keep(run, made.record("t-1"), lambda: made.to_bytes("t-1"), 1)
    record = CaptureRecord.model_validate_json((tmp_path / body.path).read_bytes())
    assert (problem, body.turns, body.branches, body.tool_calls, body.malformed_turns) == ("", 3, 2, 1, 1)
    assert record.file is not None
    again, trial_id = from_bytes((tmp_path / record.file.path).read_bytes())
    assert trial_id == "t-1" and again.record("t-1") == record.model_copy(update={"file": None})


def test_without_tokens_only_the_record_is_written(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    body, problem = keep(run, capture(moe=True).record("t-1"), None, 0)
    assert problem == "" and [path.name for path in run.captures.iterdir()] == ["t-1.json"]
    assert CaptureRecord.model_validate_json((tmp_path / body.path).read_bytes()).file is None


def test_a_disk_too_full_for_the_tokens_keeps_the_record(tmp_path: Path) -> None:
    run, made = run_in(tmp_path), capture(moe=True)
    data = made.to_bytes("t-1") + bytes(8192)
    with disk_takes(8192):
        body, problem = keep(run, made.record("t-1"), lambda: data, 0)
    assert problem == "its tokens were not kept: File too large"
    assert [path.name for path in run.captures.iterdir()] == ["t-1.json"]
    assert CaptureRecord.model_validate_json((tmp_path / body.path).read_bytes()).file is None


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    run, made = run_in(tmp_path), capture(moe=True)
    with disk_takes(0):
        body, problem = keep(run, made.record("t-1"), lambda: made.to_bytes("t-1"), 0)
    assert problem == "its capture was not kept: File too large"
    assert list(run.captures.iterdir()) == []
    assert body.sampled_tokens == made.sampled_tokens  # the counts are reported all the same


def test_a_capture_that_breaks_its_own_rules_costs_no_run(tmp_path: Path) -> None:
    run, made = run_in(tmp_path), capture(moe=True)
    made.graph.turns[0].log_probs[1] = float("nan")
    _, problem = keep(run, made.record("t-1"), lambda: made.to_bytes("t-1"), 0)
    assert problem.startswith("its tokens were not kept: turn 0 has ")
    assert [path.name for path in run.captures.iterdir()] == ["t-1.json"]
