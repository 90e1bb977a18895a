"""Whole trials in a root file system of an image, one without Python, and what becomes of a trial whose image is missing."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from sandbox.environments.images.cache import ImageCache
from sandbox.redteam import targets
from sandbox.runner.drive import Room
from sandbox.runner.outcomes import decide
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from tests.sandbox.environments.images import layout, programs, tar

from .support import in_room, needs_sandbox, play, solution, spec

pytestmark = needs_sandbox

LIMITS = {"memory_mb": 128, "processes": 32, "cpu_s": 20, "disk_mb": 16}


@pytest.mark.slow
def test_a_task_is_solved_and_graded_in_an_image_without_python(tmp_path: Path) -> None:
    layout(tmp_path / "layout", [tar(programs())], {"PATH": "/bin"})
    ImageCache(tmp_path / "cache").add_layout(tmp_path / "layout", "example/bare:1")

    async def body(room: Room) -> None:
        facts, _ = await play(room, f"python3 -c 1 && exit 9\n{solution(room)}")
        assert decide(facts) == Scored(reward=1, termination=Termination.COMPLETED), facts
        facts, _ = await play(room, "ls /usr/bin/python3", trial_id="u")
        outcome = decide(facts)
        assert isinstance(outcome, Scored) and outcome.reward == 0

    in_room(body, spec(sandbox={"image": "example/bare:1", "images": {"cache": str(tmp_path / "cache")}, "limits": LIMITS}))


def test_a_missing_image_fails_its_trials_and_no_more(tmp_path: Path) -> None:
    async def body(room: Room) -> None:
        facts, _ = await play(room, "true")
        outcome = decide(facts)
        assert isinstance(outcome, Failed) and (outcome.stage, outcome.cause) == (Stage.IMAGE, Cause.IMAGE)
        assert "rl image pull no image" in outcome.detail

    in_room(body, spec(sandbox={"image": "no image", "images": {"cache": str(tmp_path / "cache")}, "limits": LIMITS}))


@pytest.mark.slow
def test_a_tree_that_lies_in_the_image_is_played_without_its_history(tmp_path: Path) -> None:
    source = tmp_path / "tasks"
    targets.write(source)
    for path in source.iterdir():
        if path.name != "history":
            shutil.rmtree(path)
    task = source / "history"
    files = tar_of(task / "environment/workspace", "testbed")
    shutil.rmtree(task / "environment/workspace")
    toml = (task / "task.toml").read_text().replace('workdir = "/workspace"', 'workdir = "/testbed"\ndocker_image = "example/testbed:1"')
    (task / "task.toml").write_text(toml)
    layout(tmp_path / "layout", [tar(programs()), files], {"PATH": "/bin"})
    cache = ImageCache(tmp_path / "cache")
    cache.add_layout(tmp_path / "layout", "example/testbed:1")

    async def body(room: Room) -> None:
        look = f"test $PWD = /testbed && test ! -e .git/packed-refs && test ! -e .git/all.bundle && {targets.FIX}"
        facts, _ = await play(room, look)
        assert decide(facts) == Scored(reward=1, termination=Termination.COMPLETED), facts
        assert (room.tasks / "train/history/history/all.bundle").exists()

    data = {"train": str(source)}
    in_room(body, spec(data=data, sandbox={"images": {"cache": str(cache.root)}, "limits": LIMITS}))


def tar_of(directory: Path, name: str) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        archive.add(directory, name)
    return output.getvalue()
