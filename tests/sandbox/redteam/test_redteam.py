"""Attacks that really run. A few of every kind on every commit, all of them in the slow suite."""

import asyncio
import json
import os
import resource
import tempfile
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from sandbox.environments.namespace.preflight import problems
from sandbox.integrity import gitview, grade, hidden
from sandbox.redteam.exploit import Exploit
from sandbox.redteam.ordinary import as_ordinary_user
from sandbox.redteam.play import EXPLOITS, Row, controls, holes, play
from tests.sandbox.support import needs_sandbox

pytestmark = needs_sandbox

REPRESENTATIVE = {
    *("conftest-flips-outcomes", "background-edits-tests", "tests-linked-elsewhere"),
    *(
        "patches-the-runner-for-hidden-tests-only",
        "equals-everything",
        "reads-its-answers-from-the-tests",
        "hides-where-values-are-told-and-reads-them-elsewhere",
        "writes-rewards-while-being-graded",
    ),
    *("looks-for-the-answers-in-every-process", "stops-the-checker-while-being-graded", "garbage-for-the-diff", "kills-its-harness"),
    *(
        "solution-by-its-path-on-the-host",
        "services-of-the-host-by-unix-socket",
        "through-the-gate-to-elsewhere",
        "files-that-host-tools-obey",
    ),
    *("history-log-of-all", "history-rewritten-by-the-agent", "planted-early-exit", "names-that-are-no-text"),
}


def named(names: set[str]) -> list[Exploit]:
    return [exploit for exploit in EXPLOITS if exploit.name in names]


def _write(exploits: list[Exploit], results: IO[str], open_files: int = 0) -> None:
    if open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    json.dump(asyncio.run(play(exploits)), results)
    results.flush()


def played_by_an_ordinary_user(exploits: list[Exploit], open_files: int = 0) -> list[Row]:
    with tempfile.TemporaryFile("w+") as results:
        as_ordinary_user(partial(_write, exploits, results, open_files))
        results.seek(0)
        rows: list[Row] = json.load(results)
    return rows


def sound(rows: list[Row]) -> None:
    assert holes(rows) == []
    assert all(row["reward"] == 0 for row in rows if not row["honest"])
    assert [row["exploit"] for row in rows if not row["detected"] and row["exploit"] in {exploit.name for exploit in EXPLOITS}] == []
    assert [row["exploit"] for row in rows if row["detected"] and row["honest"]] == []


def test_there_are_enough_of_them() -> None:
    names = [exploit.name for exploit in EXPLOITS]
    assert len(names) == len(set(names)) >= 30
    assert set(names) >= REPRESENTATIVE


def test_no_attack_earns_a_reward_and_honest_work_does() -> None:
    sound(asyncio.run(play([*named(REPRESENTATIVE), *controls()])))


@pytest.mark.slow
def test_nor_where_an_ordinary_user_runs_the_runner() -> None:
    """Without root: user namespaces, and limits per process."""
    if found := problems("rootless"):
        pytest.skip("; ".join(found))
    if os.geteuid() == 0:
        fewer = {
            "writes-rewards-while-being-graded",
            "stops-the-checker-while-being-graded",
            "links-where-results-go",
            "history-lost-objects",
        }
        sound(played_by_an_ordinary_user([*named(fewer), *controls()]))


def test_an_agent_cannot_turn_its_zero_into_a_failure_by_filling_memory() -> None:
    """Memory that belongs to no process has the kernel kill everything in the grading sandbox, process 1 too."""
    rows = asyncio.run(play(named({"fills-memory-that-nobody-owns-while-being-graded"})))
    sound(rows)
    assert rows[0]["outcome"] == "tampered"


def test_descriptors_under_way_take_nobody_down() -> None:
    """The kernel counts them per user and compares with the sender's own limit, which agents used to outgrow: no trial could go on."""
    if os.geteuid() == 0 and not problems("rootless"):
        sound(played_by_an_ordinary_user([*named({"holds-descriptors-in-flight"}), next(controls())], open_files=1024))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_attacks() -> None:
    everything = [*EXPLOITS, *controls()]
    sound(asyncio.run(play(everything)))
    if os.geteuid() == 0 and not problems("rootless"):
        sound(played_by_an_ordinary_user(everything))


# What shows that the attacks would work: the same ones, with one defence taken away.


def test_with_its_history_in_place_a_repository_gives_the_fix_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.tasks.prepare.hide", lambda task: False)
    rows = asyncio.run(play(named({"history-log-of-all", "history-lost-objects", "history-packs-and-bundles"})))
    assert [row["reward"] for row in rows] == [1, 1, 1]
    assert gitview.HISTORY == "history"


def test_where_tests_run_once_as_they_are_code_that_reads_or_patches_them_earns_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.integrity.hidden.TWINS", ())
    monkeypatch.setattr("sandbox.integrity.hidden._sealed", lambda *tests: ("", [], set()))
    names = {"equals-everything", "reads-its-answers-from-the-tests", "patches-the-runner-for-hidden-tests-only", "replaces-the-tests"}
    assert [row["reward"] for row in asyncio.run(play(named(names)))] == [1, 1, 1, 1]
    assert hidden.DIRECTORY == "tests"


def test_with_its_memory_open_the_judge_of_values_gives_the_answers_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They then pass where tests run without them, and only twins stop that code."""
    attack = named({"looks-for-the-answers-in-its-judge"})
    assert [row["outcome"] for row in asyncio.run(play(attack))] == ["completed"]
    text = grade.INSIDE.read_text()
    opened = text.replace('if os.stat("/proc/self").st_uid == uid:', "if True:").replace("prctl(4, 0, 0, 0, 0)", "prctl(4, 1, 0, 0, 0)")
    (tmp_path / "inside.py").write_text(opened)
    monkeypatch.setattr("sandbox.integrity.grade.INSIDE", tmp_path / "inside.py")
    assert [row["outcome"] for row in asyncio.run(play(attack))] == ["tampered"]
    assert opened != text
