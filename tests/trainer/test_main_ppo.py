"""A whole training run: unmodified verl, real Ray, a random policy, and a runner that plays the harness over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from server.schemas.capture import CaptureRecord
from server.schemas.events import (
    CaptureBody,
    EvaluationBody,
    EventBody,
    GroupBody,
    OutcomeBody,
    ResumedBody,
    RunStateBody,
    StepBody,
    TrialBody,
)
from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.probes import TRAINED_WITH, TrainedWith
from server.schemas.rundir import BestFile, RunDir, RunFile, write_atomic
from server.schemas.runspec import (
    Admission,
    Algorithm,
    Checkpoint,
    Data,
    Evaluation,
    Harness,
    Kind,
    Model,
    Reporting,
    Rollout,
    RunSpec,
    Trainer,
)
from server.schemas.states import Phase, RunState
from server.schemas.trials import TrialRequest
from tests.trainer.support.fake_runner import FakeRunner, scored
from tests.trainer.support.fake_runner import Harness as Client
from tests.trainer.support.fake_server import FakeServer
from tests.trainer.support.tiny_policy import save_policy
from trainer.capture.file import from_bytes
from trainer.checkpoints.export import export
from trainer.checkpoints.kept import read_best
from trainer.launch import FINAL

pytestmark = pytest.mark.slow

STEPS, TASKS, SIZE = 2, 3, 4


@dataclass
class World:
    run: RunDir
    server: FakeServer
    runner: FakeRunner


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_policy(path)
    return path


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    server = FakeServer("events")
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    runner = FakeRunner(run.runner_file, "trials", play)
    runner.start()
    yield World(run, server, runner)
    runner.stop()
    server.stop()


async def play(client: Client, request: TrialRequest) -> Scored | Failed:
    """Task 0: nobody solves it. Task 1: a sandbox that cannot start. Task 2: a compaction. Odd samples of tasks 1 and 2 succeed."""
    task, sample = int(request.task[-1]), int(request.trial_id.rsplit("-", 1)[1])
    if request.split == "train" and task == 1 and sample == 3:
        return Failed(stage=Stage.SANDBOX_SETUP, cause=Cause.SANDBOX_SETUP, detail="no space left on device")
    messages = [{"role": "user", "content": f"repair {request.task}"}]
    for turn in range(2):
        reply = await client.chat(messages)
        assert reply is not None
        if task == 2 and sample == 1 and turn == 0:
            messages = [{"role": "user", "content": "summary of what happened so far"}]
        else:
            messages += [reply, {"role": "user", "content": "go on"}]
    return scored(task != 0 and sample % 2)


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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "trainer.launch", "--run-dir", str(world.run.root), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def of[Body: EventBody](bodies: list[EventBody], kind: type[Body]) -> list[Body]:
    return [body for body in bodies if isinstance(body, kind)]


def left_behind(world: World) -> list[str]:
    """Command lines of processes that belong to the run, given a moment to end."""
    mark = str(world.run.root)
    for _ in range(50):
        found = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        mine = [line for line in found if mark in line]
        if not mine:
            return []
        time.sleep(0.1)
    return mine


def test_two_steps_train_every_sampled_token_once(world: World, policy: Path) -> None:
    prepare(world, policy)
    launched = start(world)
    output, _ = launched.communicate(timeout=250)
    assert launched.returncode == 0, output
    assert left_behind(world) == []

    bodies = world.server.bodies()
    order = [body for body in bodies if isinstance(body, RunStateBody | EvaluationBody | StepBody)]
    assert [(type(body), getattr(body, "step", None)) for body in order] == [
        (RunStateBody, None),
        (EvaluationBody, 0),
        (StepBody, 1),
        (EvaluationBody, 2),
        (StepBody, 2),
    ]
    assert order[0] == RunStateBody(state=RunState.RUNNING)
    check_trials(bodies)
    for step in of(bodies, StepBody):
        check_step(world, bodies, step)
    assert (world.run.checkpoints / "final" / "model.safetensors").is_file()
    last = order[3]
    assert isinstance(last, EvaluationBody) and read_best(world.run) == BestFile(step=2, resolved=last.resolved, total=4)
    assert export(world.run.checkpoints / "final", policy, world.run.root / "exported").changed > 0
    assert "step 2/2" in output and "pearson 1.0000" in output
    assert tracked(world, "lego/trained_tokens") == [step.metrics["lego/trained_tokens"] for step in of(bodies, StepBody)]


def tracked(world: World, name: str) -> list[float]:
    """A metric's values in the order of their steps, as TensorBoard reads them."""
    events = EventAccumulator(str(world.run.root / "tracking" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars(name)] == [1, 2]
    return [event.value for event in events.Scalars(name)]


def check_trials(bodies: list[EventBody]) -> None:
    """Every trial is announced with its group, gets one outcome and one capture; only task 1's fourth sample fails."""
    trials = of(bodies, TrialBody)
    groups = {group.group_id: group for group in of(bodies, GroupBody)}
    outcomes = {body.trial_id: body.outcome for body in of(bodies, OutcomeBody)}
    assert len(trials) == len(outcomes) == len(of(bodies, CaptureBody)) == STEPS * TASKS * SIZE + 2 * 4
    assert {trial.trial_id for trial in trials} == outcomes.keys()
    assert all(trial.group_id in groups and trial.sample is not None for trial in trials)
    failed = {trial_id for trial_id, outcome in outcomes.items() if isinstance(outcome, Failed)}
    assert failed and all(trial_id.endswith("train-1-3") for trial_id in failed)


def check_step(world: World, bodies: list[EventBody], step: StepBody) -> None:
    """Sampled tokens of scored trials, counted from the capture files, are the trained and the excluded ones."""
    m = step.metrics
    groups = {group.group_id for group in of(bodies, GroupBody) if group.step == step.step and group.phase == "train"}
    trials = {trial.trial_id: trial.group_id for trial in of(bodies, TrialBody) if trial.group_id in groups}
    scored_trials = {b.trial_id: b.outcome for b in of(bodies, OutcomeBody) if b.trial_id in trials and isinstance(b.outcome, Scored)}
    sampled = dict.fromkeys(("all", "no signal"), 0)
    for trial_id in scored_trials:
        record = CaptureRecord.model_validate_json((world.run.captures / f"{trial_id}.json").read_bytes())
        masks = [sample.mask for sample in from_bytes((world.run.captures / f"{trial_id}.npz").read_bytes())[0].samples()]
        assert sum(int(mask.sum()) for mask in masks) == record.sampled_tokens
        sampled["all"] += record.sampled_tokens
        if "train-0" in trial_id:
            sampled["no signal"] += record.sampled_tokens
        if trial_id.endswith("train-2-1"):
            assert len(record.branches) == 2 and len(masks) == 2
    excluded = {name: n for name, n in m.items() if name.startswith("lego/excluded_tokens/")}
    assert m["lego/sampled_tokens"] == sampled["all"] == m["lego/trained_tokens"] + sum(excluded.values())
    assert excluded == ({"lego/excluded_tokens/zero_advantage": sampled["no signal"]} if sampled["no signal"] else {})
    assert m["lego/failed"] == len(trials) - len(scored_trials)
    assert m["lego/optimizer_steps"] == 4
    assert m["training/rollout_actor_probs_pearson_corr"] >= 0.999
    assert m["lego/fidelity/mean_abs"] < 1e-4
    assert m["lego/routing/replayed"] > 0 and m["lego/routing/missing"] == 0
    assert m["lego/gate/admitted"] >= 2 * len(scored_trials) and m["lego/gate/forced"] == 0
    assert m["lego/kv/evicted"] == m["lego/engine/resumed"] == 0 and m["lego/kv/reused_share"] > 0


def test_a_step_without_signal_is_a_clean_no_op(world: World, policy: Path) -> None:
    async def nobody_solves(client: Client, request: TrialRequest) -> Scored:
        await client.chat([{"role": "user", "content": request.task}])
        return scored(0)

    world.runner.play = nobody_solves
    algorithm = Algorithm(ratio_base="behaviour")
    prepare(world, policy, algorithm=algorithm, trainer=Trainer(steps=1, start="warm_fork", evaluation=Evaluation(rollouts=1)))
    launched = start(world)
    output, _ = launched.communicate(timeout=250)
    assert launched.returncode == 0, output
    (step,) = of(world.server.bodies(), StepBody)
    assert step.metrics["lego/optimizer_steps"] == 0
    assert step.metrics["lego/trained_tokens"] == 0
    assert step.metrics["lego/sampled_tokens"] == step.metrics["lego/excluded_tokens/zero_advantage"] > 0


def test_too_many_failures_stop_the_run_with_one_line(world: World, policy: Path) -> None:
    async def broken(client: Client, request: TrialRequest) -> Failed:
        return Failed(stage=Stage.IMAGE, cause=Cause.IMAGE, detail="no such image")

    world.runner.play = broken
    prepare(world, policy)
    launched = start(world)
    output, _ = launched.communicate(timeout=250)
    assert launched.returncode == FINAL
    states = of(world.server.bodies(), RunStateBody)
    assert [state.state for state in states] == [RunState.RUNNING, RunState.FAILED]
    assert states[-1].reason.startswith("TooManyFailures: 4 of 4 trials of the evaluation after step 0 failed (image 4), more than")
    assert "no such image" in states[-1].reason and f"failed: {states[-1].reason}\n" in output
    assert of(world.server.bodies(), StepBody) == []
    assert left_behind(world) == []


def test_sigterm_ends_everything(world: World, policy: Path) -> None:
    prepare(world, policy, trainer=Trainer(steps=50, start="warm_fork", evaluation=Evaluation(rollouts=1)))
    launched = start(world)
    assert launched.stdout is not None
    for line in launched.stdout:
        if line.startswith("step 1"):
            break
    os.killpg(launched.pid, signal.SIGTERM)  # as the supervisor does
    launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGTERM
    assert left_behind(world) == []


def test_a_killed_trainer_goes_on_from_its_checkpoint(world: World, policy: Path) -> None:
    """Killed in the evaluation after step 2, behind the checkpoint and before the event of the step: nothing of steps 1 and 2 is lost."""

    async def held(client: Client, request: TrialRequest) -> Scored | Failed:
        if request.trial_id.startswith("e002-"):
            await asyncio.Event().wait()
        return await play(client, request)

    world.runner.play = held
    trainer = Trainer(steps=3, start="warm_fork", evaluation=Evaluation(rollouts=4, every=2), checkpoint=Checkpoint(every=1))
    prepare(world, policy, trainer=trainer)
    launched = start(world)
    while not any(group.phase is Phase.EVAL and group.step == 2 for group in of(world.server.bodies(), GroupBody)):
        assert launched.poll() is None
        time.sleep(0.02)
    kill_everything(world)
    launched.communicate(timeout=20)
    assert [step.step for step in of(world.server.bodies(), StepBody)] == [1]

    world.runner.requests.clear()
    again = start(world, "--attempt", "2")
    output, _ = again.communicate(timeout=250)
    assert again.returncode == 0, output
    assert "step 3/3" in output and "step 1/3" not in output
    assert left_behind(world) == []
    bodies = world.server.bodies()
    assert of(bodies, ResumedBody) == [ResumedBody(step=2, attempt=2)]
    steps = of(bodies, StepBody)
    assert [step.step for step in steps] == [1, 2, 3]
    assert [done.step for done in of(bodies, EvaluationBody)] == [0, 2, 3]
    assert {request.trial_id[:6] for request in world.runner.requests} == {"e002r2", "s003r2", "e003r2"}
    assert steps[1].metrics["lego/optimizer_steps"] == 4 and steps[2].metrics["training/rollout_actor_probs_pearson_corr"] >= 0.999
    assert sorted(path.name for path in world.run.checkpoints.glob("global_step_*")) == ["global_step_2", "global_step_3"]  # `keep` is 2
    trained_with = TrainedWith.model_validate_json((world.run.checkpoints / "final" / TRAINED_WITH).read_bytes())
    assert (trained_with.run_id, trained_with.step, trained_with.history) == ("run-1", 3, "keep")
    assert (world.run.checkpoints / "final").resolve().parts[-3:] == ("global_step_3", "actor", "huggingface")


def test_an_evaluation_scores_the_weights_and_trains_nothing(world: World, policy: Path) -> None:
    prepare(world, policy, kind=Kind.EVAL, trainer=Trainer(start="warm_fork", evaluation=Evaluation(rollouts=4)))
    launched = start(world)
    output, _ = launched.communicate(timeout=250)
    assert launched.returncode == 0 and output.endswith("done: evaluated\n"), output
    bodies = world.server.bodies()
    (done,) = of(bodies, EvaluationBody)
    assert (done.step, done.executed, done.total) == (0, 4, 4)
    assert of(bodies, StepBody) == [] and not world.run.checkpoints.exists()
    assert {request.split for request in world.runner.requests} == {"held_out"}
    assert left_behind(world) == []


def kill_everything(world: World) -> None:
    mark = str(world.run.root)
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in word for word in process.info["cmdline"] or []):
            process.kill()
    assert left_behind(world) == []
