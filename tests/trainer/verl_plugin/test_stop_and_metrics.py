from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from server.schemas.capture import BranchClass, BranchReason, Exclusion
from server.schemas.events import Event, StepBody
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.spool import Reporter
from server.schemas.states import Phase
from trainer.capture.sample import Sample
from trainer.rollout.groups import Group
from trainer.rollout.manager import PlayedGroup
from trainer.rollout.trial import Rollout
from trainer.verl_plugin.metrics import LogProbs, ReportingSink, branch_metrics, disagreement, fidelity_metrics, step_line, update_metrics


def played(failures: int, size: int = 4) -> list[PlayedGroup]:
    broken = Failed(stage=Stage.SANDBOX_SETUP, cause=Cause.SANDBOX_SETUP, detail="mount:\n  no space left on device")
    fine = Scored(reward=1, termination=Termination.COMPLETED)
    members = [Rollout(f"s001-t-{i}", i, broken if i < failures else fine, [], 0, 1) for i in range(size)]
    return [PlayedGroup(Group("s001-t", 1, Phase.TRAIN, "t", "h", size, "u"), members)]


def test_engine_and_trainer_that_disagree_are_said_with_the_rule_that_tells_whose_it_is() -> None:
    name = "training/rollout_actor_probs_pearson_corr"
    for fine in ({name: 0.995}, {name: math.nan}, {}):
        assert disagreement(fine, 0.99, 1e-6, 4) is None
    found = disagreement({name: 0.97}, 0.99, 1e-6, 4)
    assert found is not None and (found.detector, found.step) == ("fidelity", 4)
    assert "Pearson 0.9700 only, less than monitors.pearson = 0.99: candidates: " in found.title and "learning_rate 0" in found.title
    settled = disagreement({name: 0.97}, 0.99, 0, 4)
    assert settled is not None and "so it comes from the engine" in settled.title


def test_a_difference_that_grows_while_no_weights_change_comes_from_the_engine() -> None:
    now = {"training/rollout_actor_probs_pearson_corr": 0.998, "lego/fidelity/mean_abs": 0.02, "lego/fidelity/tokens": 9.0}
    found = disagreement(now, 0.99, 0, 4, first=0.005)
    assert (
        found is not None and "by 0.02 nats in the mean, by 0.005 at first" in found.title and "so it comes from the engine" in found.title
    )
    assert disagreement(now, 0.99, 0, 4, first=0.0) is not None
    assert disagreement(now, 0.99, 0, 4, first=0.011) is None and disagreement(now, 0.99, 0, 4) is None
    assert disagreement(now, 0.99, 1e-6, 4, first=0.005) is None, "where the weights change, growth says nothing of the engine"
    assert disagreement(now | {"lego/fidelity/mean_abs": 5e-7}, 0.99, 0, 4, first=1e-7) is None, "fp32 rounds"


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_log_probs_that_are_not_finite_are_said(broken: float) -> None:
    """A correlation with one of them is undefined, which is not the same as good."""
    columns = LogProbs(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, broken, -3.0]), np.ones(3), np.array([0, 3]), np.zeros(3, int), 0)
    with np.errstate(invalid="ignore"):
        found = disagreement(fidelity_metrics(columns, ["mini"], [0]), 0.99, 1e-6, 4)
    assert found is not None and "is not finite" in found.title
    nothing = fidelity_metrics(columns._replace(mask=np.zeros(3)), ["mini"], [0])
    assert disagreement(nothing, 0.99, 1e-6, 4) is None


def test_a_policy_that_is_sure_of_every_token_is_no_disagreement() -> None:
    """Both sides round 1: verl's correlation of that noise is anything."""
    rollout, trainer = np.random.default_rng(0).uniform(-1e-7, 0, (2, 500))
    columns = LogProbs(rollout, trainer, np.ones(500), np.array([0, 500]), np.zeros(500, int), 0)
    metrics = {"training/rollout_actor_probs_pearson_corr": 0.63} | fidelity_metrics(columns, ["mini"], [0])
    assert disagreement(metrics, 0.99, 1e-6, 4) is None


def test_steps_are_reported_and_shown(tmp_path: Path) -> None:
    reporter = Reporter("http://127.0.0.1:1", "r", "t", "trainer", tmp_path)
    said: list[str] = []
    sink = ReportingSink(reporter, said.append, steps=3)
    sink.log({"val-core/lego/resolved": 0.2}, 0)
    sink.log({"lego/reward/mean": np.float32(0.5), "lego/trials": 64, "actor/note": "text"}, 1)
    reporter.close(0)
    bodies = [Event.model_validate_json(line).body for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert bodies == [StepBody(step=1, metrics={"lego/reward/mean": 0.5, "lego/trials": 64.0})]
    assert said == ["step 1/3  reward 0.500  64 trials, 0 failed  0 of 0 groups with signal  0 tokens trained  0.0 s"]


def test_a_step_without_scored_trials_has_a_line_too() -> None:
    assert step_line({"lego/trials": 4.0, "lego/failed": 4.0}, 2, 9).startswith("step 2/9  4 trials, 4 failed")


def test_update_metrics_weigh_rollouts_not_mini_batches() -> None:
    steps = [
        {"rollouts": 3.0, "clipped": 0.0, "abs_log_ratio": 0.0, "kl": 0.0, "loss": 1.0, "grad_norm": 2.0},
        {"rollouts": 1.0, "clipped": 1.0, "abs_log_ratio": 0.4, "kl": 1.0, "loss": 3.0, "grad_norm": 4.0},
    ]
    assert update_metrics(steps) == {
        "lego/optimizer_steps": 2.0,
        "actor/loss": 2.0,
        "actor/grad_norm": 3.0,
        "actor/clip_fraction": 0.25,
        "actor/abs_log_ratio": pytest.approx(0.1),
        "actor/abs_log_ratio_last": 0.4,
        "actor/kl_loss": 0.5,
    }


def test_fidelity_looks_at_trained_tokens_only() -> None:
    mask, one = np.array([1, 1, 1, 0]), np.array([0, 4])
    now = np.zeros(4, int)
    columns = LogProbs(np.array([-1.0, -2.0, -3.0, 0.0]), np.array([-1.0, -2.0, -3.1, 99.0]), mask, one, now, 0)
    found = fidelity_metrics(columns, ["mini"], [0])
    assert found["lego/fidelity/tokens"] == 3 and found["lego/fidelity/max_abs"] == pytest.approx(0.1)
    assert found["lego/fidelity/log_ratio/-1..-0.1"] + found["lego/fidelity/log_ratio/-0.1..-0.01"] == 1
    nothing = fidelity_metrics(LogProbs(mask, mask, np.zeros(4), one, now, 0), ["mini"], [0])
    assert math.isnan(nothing["lego/fidelity/pearson"])


def test_fidelity_is_split_by_harness_in_a_mixed_step() -> None:
    """Three rows: two branches of one rollout, and a rollout of another harness."""
    rollout, trainer = np.full(6, -1.0), np.array([-1.1, -1.1, -1.3, -1.3, -2.0, -2.0])
    columns = LogProbs(rollout, trainer, np.ones(6), np.array([0, 2, 4, 6]), np.zeros(6, int), 0)
    found = fidelity_metrics(columns, ["mini", "mini", "claude"], [0, 0, 1])
    assert found["lego/fidelity/mini/mean_abs"] == pytest.approx(0.2)
    assert found["lego/fidelity/mini/trajectory_p99"] == pytest.approx(0.2)
    assert found["lego/fidelity/claude/mean_abs"] == pytest.approx(1.0)
    assert found["lego/fidelity/trajectory_p50"] == pytest.approx(0.6)


def test_lagged_tokens_are_compared_under_their_own_weights_and_what_lies_behind_an_update_is_apart() -> None:
    """Rollout 0 is of version 4, rollout 1 began under it and went on under 5, which the trainer has."""
    rollout, versions = np.array([-1.0, -2.0, -1.5, -1.0]), np.array([4, 4, 4, 5])
    present, sampler = np.array([-1.5, -2.5, -2.0, -1.2]), np.array([-1.01, -2.0, -1.5, -1.2])
    columns = LogProbs(rollout, present, np.ones(4), np.array([0, 2, 4]), versions, 5)
    blind = fidelity_metrics(columns, ["mini", "mini"], [0, 1])
    assert blind["lego/fidelity/tokens"] == 0 and blind["lego/fidelity/lagged/mean_abs"] == pytest.approx(0.5)
    assert math.isnan(blind["training/rollout_actor_probs_pearson_corr"])
    found = fidelity_metrics(columns._replace(sampler=sampler), ["mini", "mini"], [0, 1])
    assert found["lego/fidelity/tokens"] == 3 and found["lego/fidelity/max_abs"] == pytest.approx(0.01)
    assert found["lego/fidelity/across/tokens"] == 1 and found["lego/fidelity/across/mean_abs"] == pytest.approx(0.2)
    assert found["training/rollout_actor_probs_pearson_corr"] > 0.99


def test_branches_per_rollout_show_conversations_that_fall_apart() -> None:
    """User-pain 1: nothing showed that 8 rollouts had become 64 samples."""

    def sample(reason: BranchReason, excluded: Exclusion | None = None) -> Sample:
        numbers = {name: np.zeros(4, kind) for name, kind in (("tokens", np.int32), ("log_probs", np.float32), ("versions", np.int32))}
        flags = {"mask": np.array([False, False, True, True]), "routed": np.zeros(4, bool)}
        labels = {"reason": reason, "branch_class": BranchClass.POLICY, "excluded": excluded}
        return Sample(**numbers, **flags, routes=None, prompt_len=2, **labels)  # type: ignore[arg-type]

    whole = [sample(BranchReason.ROOT), sample(BranchReason.SUB_AGENT), sample(BranchReason.RETRY, Exclusion.UNDELIVERED)]
    apart = [sample(BranchReason.ROOT), *[sample(BranchReason.HISTORY_EDITED) for _ in range(7)]]
    metrics = branch_metrics([whole, apart])
    assert (metrics["lego/branches/mean"], metrics["lego/branches/split/mean"]) == (5.0, 3.5)
    assert metrics["lego/branches/sub_agent"] == 1 and "lego/branches/retry" not in metrics
    assert branch_metrics([]) == {}
