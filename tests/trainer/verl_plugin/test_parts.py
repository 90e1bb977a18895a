from __future__ import annotations

import numpy as np
import pytest

from server.schemas.runspec import Algorithm, Data, Harness, Model, RunSpec, Trainer
from trainer.learning.replay import ReplayCounts
from trainer.rollout.manager import parts_of_a_step
from trainer.rollout.schedule import PARTS
from trainer.verl_plugin.metrics import LogProbs, fidelity_metrics
from trainer.verl_plugin.parts import Compared, one_update, together, verls_own
from trainer.verl_plugin.update import RowOwners


def compared(lengths: list[int], rollouts: list[int], seed: int) -> Compared:
    draws, count = np.random.default_rng(seed), sum(lengths)
    trainer = draws.normal(-1, 0.5, count).astype(np.float32)
    noisy = trainer + draws.normal(0, 0.01, count).astype(np.float32)
    versions = draws.integers(3, 5, count).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = LogProbs(noisy, trainer, draws.integers(0, 2, count), offsets, versions, 4, trainer.copy())
    return Compared(columns, RowOwners(["h"] * len(lengths), rollouts, versions), [ReplayCounts(seed, 0, 0)], float(seed))


def test_fidelity_of_parts_is_that_of_one_batch() -> None:
    parts = [compared([4, 3], [0, 0], 1), compared([5], [0], 2), compared([2, 6, 1], [0, 1, 1], 3)]
    whole = together(parts)
    assert [counts.replayed for counts in whole.replayed] == [1, 2, 3]
    assert whole.columns.offsets.tolist() == [0, 4, 7, 12, 14, 20, 21] and whole.owners.rollouts == [0, 0, 1, 2, 3, 3]
    assert whole.columns.rollout.tolist() == [value for part in parts for value in part.columns.rollout.tolist()]
    metrics = fidelity_metrics(whole.columns, whole.owners.harnesses, whole.owners.rollouts)
    assert metrics["lego/fidelity/tokens"] + metrics.get("lego/fidelity/across/tokens", 0) == sum(part.columns.mask.sum() for part in parts)
    assert whole.entropy == pytest.approx((2 * 1 + 1 * 2 + 3 * 3) / 6)
    mask = whole.columns.mask == 1
    gaps = np.abs(np.exp(whole.columns.rollout) - np.exp(whole.columns.trainer))[mask]
    own = verls_own(whole)
    assert own["actor/entropy"] == whole.entropy and own["training/rollout_probs_diff_max"] == gaps.max()
    assert own["training/rollout_probs_diff_std"] == pytest.approx(gaps.std(ddof=1))
    alone = together(parts[:1])
    assert alone.columns.offsets.tolist() == [0, 4, 7] and alone.owners.rollouts == [0, 0]


def test_metrics_of_the_parts_add_up_to_one_optimizer_step() -> None:
    assert one_update([{"loss": 1.0, "rollouts": 3.0}, {"loss": -0.5, "rollouts": 1.0}], 0.7) == {
        "loss": 0.5, "rollouts": 4.0, "grad_norm": 0.7,
    }  # fmt: skip


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm(loss="ppo"),
        Algorithm(epochs=2),
        Algorithm(minibatches=2),
        Algorithm(ratio_base="recomputed", importance_sampling="token"),
    ],
)
def test_a_step_is_trained_in_parts_where_their_gradients_add_up(algorithm: Algorithm) -> None:
    harness = Harness(name="h", version="1")
    spec = RunSpec(model=Model(path="m"), harnesses=[harness], data=Data(family="onebug"), trainer=Trainer(schedule="async"))
    assert parts_of_a_step(spec) == PARTS
    assert parts_of_a_step(spec.model_copy(update={"algorithm": algorithm})) == 1
    assert parts_of_a_step(spec.model_copy(update={"trainer": Trainer(schedule="sync")})) == 1
