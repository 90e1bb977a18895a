"""A whole training run: unmodified verl, real Ray, a random policy, and a runner that plays the harness over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from server.schemas.capture import CaptureRecord
from server.schemas.events import (
    CaptureBody,
    EvaluationBody,
    EventBody,
    FindingBody,
    GroupBody,
    OutcomeBody,
    ResumedBody,
    RunStateBody,
    StepBody,
    TrialBody,
)
from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.probes import TRAINED_WITH, TrainedWith
from server.schemas.rundir import BestFile, CheckpointFile, write_atomic
from server.schemas.runspec import Algorithm, Checkpoint, Data, Evaluation, Kind, Monitors, Reporting, Sandbox, Trainer
from server.schemas.states import Phase, RunState
from server.schemas.trials import TrialRequest
from tests.trainer.support.fake_runner import Harness as Client
from tests.trainer.support.fake_runner import scored
from tests.trainer.support.main_ppo import SIZE, STEPS, TASKS, World, kill_everything, left_behind, of, prepare, start
from tests.trainer.support.plays import mixed
from trainer.capture.file import from_bytes
from trainer.checkpoints.export import export
from trainer.checkpoints.kept import read_best
from trainer.launch import FINAL

pytestmark = pytest.mark.slow


@pytest.fixture
def world(bare_world: World) -> World:
    bare_world.runner.play = mixed
    return bare_world


def test_five_steps_train_every_sampled_token_once(world: World, policy: Path) -> None:
    prepare(world, policy, reporting=Reporting(trackers=("wandb", "tensorboard")))
    launched = start(world)
    output, _ = launched.communicate(timeout=800)
    assert launched.returncode == 0, output
    assert left_behind(world) == []

    bodies = world.server.bodies()
    order = [body for body in bodies if isinstance(body, RunStateBody | EvaluationBody | StepBody)]
    steps = [(StepBody, step) for step in range(1, STEPS + 1)]
    assert [(type(body), getattr(body, "step", None)) for body in order] == [
        (RunStateBody, None),
        (EvaluationBody, 0),
        *steps[:-1],
        (EvaluationBody, STEPS),
        steps[-1],
    ]
    assert order[0] == RunStateBody(state=RunState.RUNNING)
    check_trials(bodies)
    for step in of(bodies, StepBody):
        check_step(world, bodies, step)
    assert (world.run.checkpoints / "final" / "model.safetensors").is_file()
    last = order[-2]
    assert isinstance(last, EvaluationBody) and read_best(world.run) == BestFile(step=STEPS, resolved=last.resolved, total=4)
    assert export(world.run.checkpoints / "final", policy, world.run.root / "exported").changed > 0
    assert f"step {STEPS}/{STEPS}" in output and "pearson 1.0000" in output
    assert tracked(world, "lego/trained_tokens") == [step.metrics["lego/trained_tokens"] for step in of(bodies, StepBody)]
    (kept,) = (world.run.root / "tracking" / "wandb").glob("offline-run-*/*.wandb")
    assert b"lego/trained_tokens" in kept.read_bytes()


def tracked(world: World, name: str) -> list[float]:
    """A metric's values in the order of their steps, as TensorBoard reads them."""
    events = EventAccumulator(str(world.run.root / "tracking" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars(name)] == list(range(1, STEPS + 1))
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


def test_steps_without_signal_or_without_a_row_are_clean_no_ops(world: World, policy: Path) -> None:
    """Nobody solves anything in the first step, and no sandbox starts in the second."""

    async def play(client: Client, request: TrialRequest) -> Scored | Failed:
        if request.trial_id.startswith("s002"):
            return Failed(stage=Stage.SANDBOX_SETUP, cause=Cause.SANDBOX_SETUP, detail="no space left on device")
        await client.chat([{"role": "user", "content": request.task}])
        return scored(0)

    world.runner.play = play
    trainer = Trainer(steps=3, start="warm_fork", evaluation=Evaluation(rollouts=1))
    prepare(world, policy, algorithm=Algorithm(ratio_base="behaviour"), trainer=trainer, monitors=Monitors(failed_share=1))
    launched = start(world)
    output, _ = launched.communicate(timeout=800)
    assert launched.returncode == 0, output
    quiet, empty, last = (step.metrics for step in of(world.server.bodies(), StepBody))
    for m in (quiet, last):
        assert m["lego/optimizer_steps"] == m["lego/trained_tokens"] == 0
        assert m["lego/sampled_tokens"] == m["lego/excluded_tokens/zero_advantage"] > 0
    assert empty["lego/optimizer_steps"] == empty["lego/sampled_tokens"] == 0 and empty["lego/failed"] == TASKS * SIZE


def test_too_many_failures_stop_the_run_within_the_step_with_one_line(world: World, policy: Path) -> None:
    async def broken(client: Client, request: TrialRequest) -> Scored | Failed:
        if request.trial_id.startswith("e"):
            await client.chat([{"role": "user", "content": request.task}])
            return scored(0)
        return Failed(stage=Stage.IMAGE, cause=Cause.IMAGE, detail="no such image")

    world.runner.play = broken
    places = 5
    prepare(world, policy, sandbox=Sandbox(concurrency=places - 4))
    launched = start(world)
    output, _ = launched.communicate(timeout=800)
    assert launched.returncode == FINAL
    states = of(world.server.bodies(), RunStateBody)
    assert [state.state for state in states] == [RunState.RUNNING, RunState.FAILED]
    allowed = TASKS * SIZE // 2
    assert states[-1].reason.startswith(
        f"TooManyFailures: {allowed + 1} of {TASKS * SIZE} trials of step 1 failed (image {allowed + 1}), more"
    )
    assert "no such image" in states[-1].reason and f"failed: {states[-1].reason}\n" in output
    begun = [request.trial_id for request in world.runner.requests if request.trial_id.startswith("s")]
    assert allowed < len(begun) <= allowed + places < TASKS * SIZE
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
    launched.communicate(timeout=300)
    assert launched.returncode == 128 + signal.SIGTERM
    assert left_behind(world) == []


def test_a_killed_trainer_goes_on_from_its_checkpoint(world: World, policy: Path) -> None:
    """Killed in the evaluation after step 2, behind the checkpoint and before the event of the step: nothing of steps 1 and 2 is lost."""

    async def held(client: Client, request: TrialRequest) -> Scored | Failed:
        if request.trial_id.startswith("e002-"):
            await asyncio.Event().wait()
        return await mixed(client, request)

    world.runner.play = held
    trainer = Trainer(steps=3, start="warm_fork", evaluation=Evaluation(rollouts=4, every=2), checkpoint=Checkpoint(every=1))
    prepare(world, policy, trainer=trainer, data=Data(family="onebug", sampling="relative"))
    launched = start(world)
    while not any(group.phase is Phase.EVAL and group.step == 2 for group in of(world.server.bodies(), GroupBody)):
        assert launched.poll() is None
        time.sleep(0.02)
    kill_everything(world)
    launched.communicate(timeout=60)
    assert [step.step for step in of(world.server.bodies(), StepBody)] == [1]

    world.runner.requests.clear()
    file = world.run.load()
    changed = file.spec.trainer.model_copy(update={"grad_clip": 0.9})
    write_atomic(world.run.run_file, file.model_copy(update={"spec": file.spec.model_copy(update={"trainer": changed})}).model_dump_json())
    again = start(world, "--attempt", "2")
    output, _ = again.communicate(timeout=800)
    assert again.returncode == 0, output
    assert "step 3/3" in output and "step 1/3" not in output
    assert left_behind(world) == []
    bodies = world.server.bodies()
    assert of(bodies, ResumedBody) == [ResumedBody(step=2, attempt=2)]
    said = "The run goes on with other settings than before the checkpoint: trainer.grad_clip: 1.0 → 0.9"
    assert said in [finding.title for finding in of(bodies, FindingBody)]
    steps = of(bodies, StepBody)
    assert [step.step for step in steps] == [1, 2, 3]
    assert [done.step for done in of(bodies, EvaluationBody)] == [0, 2, 3]
    assert {request.trial_id[:6] for request in world.runner.requests} == {"e002r2", "s003r2", "e003r2"}
    assert [step.metrics["lego/pool/seen"] for step in steps] == [3, 3, 3], "what was known of the tasks is not forgotten"
    latest = CheckpointFile.model_validate_json(world.run.latest_checkpoint.read_bytes())
    assert {known.groups for known in latest.pool.values()} == {1 + 0.75 + 0.75**2}
    assert steps[1].metrics["lego/optimizer_steps"] == 4 and steps[2].metrics["training/rollout_actor_probs_pearson_corr"] >= 0.999
    assert sorted(path.name for path in world.run.checkpoints.glob("global_step_*")) == ["global_step_2", "global_step_3"]  # `keep` is 2
    (optimizer,) = (world.run.checkpoints / "global_step_3" / "actor").glob("optim_*.pt")
    moments = torch.load(optimizer, weights_only=False)["state"].values()
    assert {int(moment["step"]) for moment in moments} == {3 * 4}, "the optimizer went on too"
    trained_with = TrainedWith.model_validate_json((world.run.checkpoints / "final" / TRAINED_WITH).read_bytes())
    assert (trained_with.run_id, trained_with.step, trained_with.history) == ("run-1", 3, "keep")
    assert (world.run.checkpoints / "final").resolve().parts[-3:] == ("global_step_3", "actor", "huggingface")


def test_an_evaluation_scores_the_weights_and_trains_nothing(world: World, policy: Path) -> None:
    prepare(world, policy, kind=Kind.EVAL, trainer=Trainer(start="warm_fork", evaluation=Evaluation(rollouts=4)))
    launched = start(world)
    output, _ = launched.communicate(timeout=800)
    assert launched.returncode == 0 and output.endswith("done: evaluated\n"), output
    bodies = world.server.bodies()
    (done,) = of(bodies, EvaluationBody)
    assert (done.step, done.executed, done.total) == (0, 4, 4)
    assert of(bodies, StepBody) == [] and not world.run.checkpoints.exists()
    assert {request.split for request in world.runner.requests} == {"held_out"}
    assert left_behind(world) == []
