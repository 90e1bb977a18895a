from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from server.runs.conclude import Facts, conclude, first_error
from server.schemas.rundir import ExitFile
from server.schemas.states import RunState

CLEAN = ExitFile(trainer=0, runner_restarts=0, stopped=False, tail=[])
COMPLETE = Facts(
    exit=CLEAN, stop_requested=False, reported="", steps_done=12, steps_expected=12, final_evaluation=True, first_error="ValueError: x"
)


def test_a_complete_run_succeeded() -> None:
    assert conclude(COMPLETE).state is RunState.SUCCEEDED


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (replace(COMPLETE, exit=CLEAN.model_copy(update={"trainer": 2})), "the trainer ended with exit code 2: ValueError: x"),
        (replace(COMPLETE, exit=CLEAN.model_copy(update={"trainer": -15})), "the trainer was ended by SIGTERM: ValueError: x"),
        (replace(COMPLETE, steps_done=11, first_error=""), "without an error after 11 of 12 steps: its log names no error"),
        (replace(COMPLETE, final_evaluation=False), "without the held-out evaluation after the last step"),
        (replace(COMPLETE, exit=None), "nothing says how they ended"),
        (replace(COMPLETE, exit=CLEAN.model_copy(update={"trainer": -15, "reason": "the runner died 6 times in a row"})), "died 6 times"),
        (replace(COMPLETE, exit=CLEAN.model_copy(update={"trainer": 1}), reported="failed: pearson .9", first_error=""), "pearson .9"),
        (
            replace(COMPLETE, exit=CLEAN.model_copy(update={"trainer": 1}), reported="failed: RayTaskError", first_error="KeyError: 'a'"),
            "exit code 1: RayTaskError; first error in its log: KeyError: 'a'",
        ),
        (
            replace(
                COMPLETE,
                exit=CLEAN.model_copy(update={"trainer": 1}),
                reported="failed: KeyError: 'a' at once",
                first_error="KeyError: 'a'",
            ),
            "exit code 1: KeyError: 'a' at once (trainer.log)",
        ),
    ],
)
def test_anything_less_failed_and_says_why(facts: Facts, problem: str) -> None:
    conclusion = conclude(facts)
    assert conclusion.state is RunState.FAILED
    assert problem in conclusion.problem


def test_the_trainers_word_counts_only_where_its_exit_code_was_lost() -> None:
    assert conclude(replace(COMPLETE, exit=None, reported="succeeded")).state is RunState.SUCCEEDED
    assert conclude(replace(COMPLETE, exit=None, reported="succeeded", steps_done=1)).state is RunState.FAILED


def test_a_run_that_was_complete_before_it_could_be_stopped_succeeded() -> None:
    assert conclude(replace(COMPLETE, stop_requested=True)).state is RunState.SUCCEEDED
    assert conclude(replace(COMPLETE, exit=CLEAN.model_copy(update={"trainer": -15, "stopped": True}))).state is RunState.STOPPED


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("fine\n", ""),
        ("0 errors so far\nWARNING x\n[ERROR] disk: full\nERROR: later\n", "[ERROR] disk: full"),
        (
            "(TaskRunner pid=12) Traceback (most recent call last):\n(TaskRunner pid=12)   File x\n(TaskRunner pid=12) KeyError: 'a'\n",
            "KeyError: 'a'",
        ),
        (
            "Traceback (most recent call last):\n  a\nOSError: first\nTraceback (most recent call last):\n  b\nRayError: second\n",
            "OSError: first",
        ),
        ('  File "x.py", line 1\n    a b Error: \nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
        ("Traceback (most recent call last):\n  a\nHTTPError: Bearer abcdef\n", "HTTPError: Bearer ***"),
    ],
)
def test_the_first_error_of_a_log_is_shown(tmp_path: Path, log: str, error: str) -> None:
    (tmp_path / "trainer.log").write_text(log)
    assert first_error(tmp_path / "trainer.log") == error
    assert first_error(tmp_path / "absent.log") == ""
