"""Training runs in tests: unmodified verl, real Ray, a random policy, and a runner that plays the harness over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from server.schemas.events import EventBody
from server.schemas.rundir import RunDir, RunFile, write_atomic
from server.schemas.runspec import Admission, Algorithm, Data, Evaluation, Harness, Model, Reporting, Rollout, RunSpec, Trainer
from tests.trainer.support.fake_runner import FakeRunner, scored
from tests.trainer.support.fake_server import FakeServer

STEPS, TASKS, SIZE = 5, 3, 4


@dataclass
class World:
    run: RunDir
    server: FakeServer
    runner: FakeRunner


@contextlib.contextmanager
def opened(root: Path) -> Iterator[World]:
    """A run's directory, a server for its events, and a runner whose `play` the test sets."""

    async def nothing(*_: object) -> object:
        return scored(0)

    server, run = FakeServer("events"), RunDir(root)
    run.root.mkdir()
    runner = FakeRunner(run.runner_file, "trials", nothing)  # type: ignore[arg-type]
    runner.start()
    try:
        yield World(run, server, runner)
    finally:
        runner.stop()
        server.stop()


def prepare(world: World, policy: Path, **changes: object) -> RunSpec:
    spec = RunSpec(
        model=Model(path=str(policy), context=400),
        harnesses=[Harness(name="fake", version="1")],
        data=Data(family="onebug"),
        rollout=Rollout(tasks_per_step=TASKS, group_size=SIZE, max_new_tokens=8, max_turns=4, admission=Admission(enabled=True)),
        algorithm=Algorithm(clip_low=0.03, clip_high=0.04, ratio_base="recomputed", epochs=2, minibatches=2),
        trainer=Trainer(steps=STEPS, learning_rate=1e-3, start="warm_fork", evaluation=Evaluation(rollouts=4)),
        reporting=Reporting(trackers=("tensorboard",)),
    ).model_copy(update=changes)
    for split in ("train", "held_out"):
        folder = world.run.tasks / split
        folder.mkdir(parents=True)
        lines = [json.dumps({"task": f"{split}-{i}", "kind": "", "instruction": "repair it"}) for i in range(TASKS)]
        (folder / "index.jsonl").write_text("\n".join(lines))
    file = RunFile(
        run_id="run-1", server_url=world.server.url, event_token="events", runner_token="trials", runtimes=world.run.root, spec=spec
    )
    write_atomic(world.run.run_file, file.model_dump_json())
    return spec


def start(world: World, *options: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "trainer.launch", "--run-dir", str(world.run.root), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def of[Body: EventBody](bodies: list[EventBody], kind: type[Body]) -> list[Body]:
    return [body for body in bodies if isinstance(body, kind)]


def left_behind(world: World) -> list[str]:
    """Command lines of processes that belong to the run, given a moment to end."""
    mark = str(world.run.root)
    end = time.monotonic() + 60
    while True:
        found = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        mine = [line for line in found if mark in line]
        if not mine or time.monotonic() > end:
            return mine
        time.sleep(0.1)


def kill_everything(world: World) -> None:
    mark = str(world.run.root)
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in word for word in process.info["cmdline"] or []):
            process.kill()
    assert left_behind(world) == []
