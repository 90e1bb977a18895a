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
from tests.sandbox.environments.images import directory, layout, programs, tar

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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("buildah") is None, reason="needs the Debian package buildah")
def test_a_dockerfile_is_built_before_the_run_and_searched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "tasks"
    targets.write(source)
    for path in source.iterdir():
        if path.name != "calc":
            shutil.rmtree(path)
    environment = source / "calc/environment"
    (environment / "workspace").rename(environment / "source")
    (environment / "root.tar").write_bytes(tar([*programs(), directory("proc"), directory("dev"), directory("sys"), directory("etc")]))
    lines = ["FROM scratch", "ADD root.tar /", "COPY source /testbed", "COPY helpers.py /opt/leaked.py", "RUN touch /built"]
    (environment / "Dockerfile").write_text("\n".join([*lines, "ENV PATH=/bin"]) + "\n")
    (environment / "helpers.py").write_text((source / "calc/tests/test_hidden.py").read_text())
    toml = (source / "calc/task.toml").read_text()
    (source / "calc/task.toml").write_text(toml.replace('workdir = "/workspace"', 'workdir = "/testbed"'))

    async def body(room: Room) -> None:
        facts, _ = await play(room, f"test -e /built && {targets.FIX}")
        assert decide(facts) == Scored(reward=1, termination=Termination.COMPLETED), facts

    images = {"cache": str(tmp_path / "cache"), "build": True}
    in_room(body, spec(data={"train": str(source)}, sandbox={"images": images, "limits": LIMITS}))
    assert "gives it away: /opt/leaked.py" in caplog.text


def tar_of(tree: Path, name: str) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        archive.add(tree, name)
    return output.getvalue()
