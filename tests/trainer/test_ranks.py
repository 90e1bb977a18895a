"""Training by several processes, each with a share of the weights and of every batch: what they learn is what one would have learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from server.schemas.events import StepBody
from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.runspec import Algorithm, Cluster, Evaluation, Trainer
from server.schemas.trials import TrialRequest
from tests.trainer.support.fake_runner import Harness as Client
from tests.trainer.support.fake_runner import scored
from tests.trainer.support.main_ppo import left_behind, of, opened, prepare, start

MINIBATCHES, EPOCHS = 4, 2


async def play(client: Client, request: TrialRequest) -> Scored | Failed:
    """Task 0 is never solved. Of task 1 a sandbox cannot start. Task 2 has a compaction: eight rows of seven rollouts are trained."""
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


def run(root: Path, policy: Path, ranks: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of the steps, and the weights behind them. Seven rollouts in four mini-batches: some have a row on one rank only."""
    with opened(root) as world:
        world.runner.play = play
        trainer = Trainer(
            steps=2, learning_rate=1e-3, start="warm_fork", evaluation=Evaluation(rollouts=1), cluster=Cluster(gpus_per_node=ranks)
        )
        algorithm = Algorithm(clip_low=0.9, clip_high=9, epochs=EPOCHS, minibatches=MINIBATCHES)
        prepare(world, policy, trainer=trainer, algorithm=algorithm)
        launched = start(world)
        output, _ = launched.communicate(timeout=800)
        assert launched.returncode == 0, output
        assert left_behind(world) == []
        return [step.metrics for step in of(world.server.bodies(), StepBody)], load_file(world.run.checkpoints / "final/model.safetensors")


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_from_the_same_rollouts(tmp_path: Path, policy: Path) -> None:
    (one, weights), (two, others) = (run(tmp_path / str(ranks), policy, ranks) for ranks in (1, 2))
    for alone, shared in zip(one, two, strict=True):
        assert shared["lego/optimizer_steps"] == MINIBATCHES * EPOCHS
        same = "lego/trained_tokens", "lego/excluded_tokens/zero_advantage", "lego/failed", "lego/routing/replayed"
        assert {name: shared[name] for name in same} == {name: alone[name] for name in same}
        assert alone["actor/grad_norm"] > 0.01 and alone["actor/abs_log_ratio_last"] > 1e-4
        for name in ("loss", "grad_norm", "abs_log_ratio", "abs_log_ratio_last", "clip_fraction", "entropy"):
            assert shared[f"actor/{name}"] == pytest.approx(alone[f"actor/{name}"], rel=1e-4, abs=1e-6), name
        # Both processes generate, and each with the weights that both together have.
        assert shared["training/rollout_actor_probs_pearson_corr"] >= 0.9999 and shared["lego/fidelity/mean_abs"] < 1e-4
    assert max(float((others[name] - value).abs().max()) for name, value in weights.items()) < 1e-5
