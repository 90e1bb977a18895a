"""Training by several processes, each with a share of the weights and of every batch: what they learn is what one would have learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from server.schemas.events import StepBody
from server.schemas.runspec import Algorithm, Cluster, Evaluation, Trainer
from tests.trainer.support.main_ppo import left_behind, of, opened, prepare, start
from tests.trainer.support.plays import mixed

MINIBATCHES, EPOCHS = 4, 2


def run(root: Path, policy: Path, ranks: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of the steps, and the weights behind them. Seven rollouts in four mini-batches: some have a row on one rank only."""
    with opened(root) as world:
        world.runner.play = mixed
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
