"""A whole training run whose rollouts vLLM's CPU build generates (`make test-vllm`); skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Literal

import psutil
import pytest

from server.schemas.events import StepBody
from server.schemas.outcome import Failed, Scored
from server.schemas.runspec import Algorithm, Evaluation, Rollout, Trainer
from server.schemas.trials import TrialRequest
from tests.trainer.support.fake_runner import Harness as Client
from tests.trainer.support.main_ppo import SIZE, TASKS, World, left_behind, of, prepare, start
from tests.trainer.support.plays import two_turns
from tests.trainer.support.tiny_policy import save_policy

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")
pytestmark = pytest.mark.slow

STEPS, LONGEST = 3, 240


@pytest.mark.parametrize(("kind", "schedule"), [("tied", "sync"), ("experts", "sync"), ("dense", "async"), ("experts", "async")])
def test_three_steps_train_what_vllm_sampled(bare_world: World, tmp_path: Path, kind: str, schedule: Literal["sync", "async"]) -> None:
    """With experts, under the routes that vLLM took. A tied policy's output layer is its embedding."""
    world, policy, dense = bare_world, tmp_path / "policy", kind != "experts"
    save_policy(policy, dense=dense, tied=kind == "tied", head_dim=64)

    async def play(client: Client, request: TrialRequest) -> Scored | Failed:
        """Trials of the second step generate without a pause until the first one is over. Their turns differ in length, so that they do
        not all end at the same moment: weights change in the middle of some."""
        calls, lengths = 0, Random(request.trial_id)
        while schedule == "async" and request.trial_id.startswith("s002-") and not of(world.server.bodies(), StepBody):
            calls += 1
            said = [{"role": "user", "content": f"{calls}: go on with {request.task}"}]
            assert await client.chat(said, longest=lengths.randint(LONGEST // 2, LONGEST)) is not None
        return await two_turns(client, request)

    world.runner.play = play
    prepare(
        world,
        policy,
        rollout=Rollout(
            tasks_per_step=TASKS, group_size=SIZE, max_new_tokens=LONGEST if schedule == "async" else 8, max_turns=500, engine="vllm"
        ),
        algorithm=Algorithm(clip_low=0.03, clip_high=0.04, minibatches=2, routing_replay=not dense),
        trainer=Trainer(steps=STEPS, schedule=schedule, learning_rate=1e-3, evaluation=Evaluation(rollouts=4)),
    )
    launched = start(world)
    output, _ = launched.communicate(timeout=1500)
    assert launched.returncode == 0, output
    steps = of(world.server.bodies(), StepBody)
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        pearson, difference = (step.metrics[name] for name in ("training/rollout_actor_probs_pearson_corr", "lego/fidelity/mean_abs"))
        tokens = step.metrics["lego/trained_tokens"]
        print(f"{kind} {schedule}, step {step.step}: {tokens:.0f} tokens, Pearson {pearson:.7f}, mean |Δ log p| {difference:.1e}")
        assert pearson >= 0.999 and difference < 1e-4
        assert tokens > 0 and (schedule == "async" or step.metrics["lego/optimizer_steps"] == 2)
        if not dense:
            assert step.metrics["lego/routing/replayed"] > 0 == step.metrics["lego/routing/missing"]
    assert schedule == "sync" or sum(step.metrics["lego/engine/resumed"] for step in steps) > 0
    assert left_behind(world) == []
    engines = [process for process in psutil.process_iter(["name", "status"]) if (process.info["name"] or "").startswith("VLLM::")]
    # An engine that another test had in this process lies dead until the process ends.
    assert [process for process in engines if process.info["status"] != psutil.STATUS_ZOMBIE] == []
