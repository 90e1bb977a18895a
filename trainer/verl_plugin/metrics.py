"""Where verl's metrics go: to the server, and as one readable line per step to a log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from server.schemas.capture import BranchReason, Exclusion
from server.schemas.events import FindingBody, StepBody
from server.schemas.spool import Reporter
from trainer.capture.sample import Sample
from trainer.learning.fidelity import EDGES, fidelity
from trainer.learning.replay import ReplayCounts


class LogProbs(NamedTuple):
    """Rows laid end to end: row i holds tokens `offsets[i]` to `offsets[i + 1]`. `mask` is true on trained tokens, `versions` are those of
    the weights that sampled them, `present` that of the trainer at the step's start."""

    rollout: np.ndarray
    trainer: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    versions: np.ndarray
    present: int
    sampler: np.ndarray | None = None
    """Log-probs of the trainer's under the weights that sampled each token, when they were computed."""

    @property
    def lagged(self) -> np.ndarray:
        return self.mask.astype(bool) & (self.versions != self.present)


class ReportingSink:
    """A backend of verl's `Tracking`. The log of step 0 holds an evaluation only, which is reported as such."""

    def __init__(self, reporter: Reporter, say: Callable[[str], None], steps: int) -> None:
        self._reporter, self._say, self._steps = reporter, say, steps

    def log(self, data: dict[str, Any], step: int) -> None:
        if step == 0:
            return
        metrics = numbers(data)
        self._reporter.report(StepBody(step=step, metrics=metrics))
        self._say(step_line(metrics, step, self._steps))


PEARSON = "training/rollout_actor_probs_pearson_corr"
"""verl's name."""
GROWTH, NOISE = 2.0, 1e-4
"""How many times the first step's mean difference is growth, and the difference in nats below which nothing is: fp32 has 1e-7 or so."""


def disagreement(
    metrics: Mapping[str, float], least: float, learning_rate: float, step: int, first: float = math.nan
) -> FindingBody | None:
    """What is to be said when engine and trainer disagree: log-probs that are not finite, a correlation of probabilities below `least`
    (`monitors.pearson`) or, at learning rate 0, a mean difference that has grown over `first`, that of the run's first step."""
    pearson, mean = metrics.get(PEARSON, math.nan), metrics.get("lego/fidelity/mean_abs", math.nan)
    if metrics.get("lego/fidelity/tokens") and not math.isfinite(mean):
        title = f"In step {step} a log-probability of engine or trainer is not finite: an overflow in one of them, or weights that are none"
        return FindingBody(detector="fidelity", title=title, step=step)
    if pearson < least:
        seen = f"In step {step} engine and trainer agree with Pearson {pearson:.4f} only, less than monitors.pearson = {least:g}"
    elif learning_rate == 0 and mean > NOISE and mean > GROWTH * first:
        seen = f"In step {step} engine and trainer differ by {mean:.2g} nats in the mean, by {first:.2g} at first"
    else:
        return None
    if learning_rate == 0:
        why = "the weights do not change at learning_rate 0, so it comes from the engine: its precision, its kernels, its routes"
    else:
        why = (
            "candidates: the engine's numerics, or weights that did not reach it. Run it again with trainer.learning_rate 0:"
            " what is there, or grows, at 0 comes from the engine"
        )
    return FindingBody(detector="fidelity", title=f"{seen}: {why}", step=step)


def numbers(data: dict[str, Any]) -> dict[str, float]:
    """verl mixes texts and tables into its metrics."""
    return {name: float(value) for name, value in data.items() if isinstance(value, Real)}


def step_line(metrics: dict[str, float], step: int, steps: int) -> str:
    """`step 3/12  reward .41  64 trials, 2 failed  6 of 8 groups with signal  1,402 tokens trained  pearson 1.0000  9.8 s`"""
    value = metrics.get
    parts = [f"step {step}/{steps}"]
    if not math.isnan(reward := value("lego/reward/mean", math.nan)):
        parts.append(f"reward {reward:.3f}")
    parts.append(f"{value('lego/trials', 0):.0f} trials, {value('lego/failed', 0):.0f} failed")
    parts.append(f"{value('lego/groups_with_signal', 0):.0f} of {value('lego/groups', 0):.0f} groups with signal")
    parts.append(f"{value('lego/trained_tokens', 0):,.0f} tokens trained")
    if not math.isnan(pearson := value(PEARSON, math.nan)):
        parts.append(f"pearson {pearson:.5f}")
    parts.append(f"{value('timing_s/step', 0):.1f} s")
    return "  ".join(parts)


def update_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps; clip fraction and mean |log σ| over rollouts, and |log σ| of the last step by itself."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    return {
        "lego/optimizer_steps": float(len(steps)),
        "actor/loss": total["loss"] / len(steps),
        "actor/grad_norm": total["grad_norm"] / len(steps),
        "actor/clip_fraction": total["clipped"] / total["rollouts"],
        "actor/abs_log_ratio": total["abs_log_ratio"] / total["rollouts"],
        "actor/abs_log_ratio_last": steps[-1]["abs_log_ratio"] / steps[-1]["rollouts"],
        "actor/kl_loss": total["kl"] / len(steps),
    }


def routing_metrics(ranks: Sequence[ReplayCounts]) -> dict[str, float]:
    """(token, layer) rows that were replayed, those of them that would have gone elsewhere by themselves, and how far the trainer's own
    router agrees with the recorded experts. Nothing where nobody counts."""
    if not ranks:
        return {}
    replayed = sum(counts.replayed for counts in ranks)
    metrics = {"lego/routing/replayed": float(replayed), "lego/routing/changed": float(sum(counts.changed for counts in ranks))}
    for name in ("overlap", "top1") if replayed else ():
        shares = [getattr(counts, name) * counts.replayed for counts in ranks if counts.replayed]
        metrics[f"lego/routing/{name}"] = sum(shares) / replayed
    return metrics


SPLITS = (BranchReason.HISTORY_EDITED, BranchReason.TOOLS_CHANGED, BranchReason.TEMPLATE_STRIP)
"""A conversation that falls apart into samples without a compaction or a sub-agent (reports: 8 rollouts became 64 samples)."""


def branch_metrics(rollouts: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Branches of scored rollouts: per rollout, by reason, and how many per rollout no compaction and no sub-agent accounts for."""
    reasons = Counter(s.reason for samples in rollouts for s in samples if s.excluded is not Exclusion.UNDELIVERED)
    if not reasons:
        return {}
    split = sum(reasons[reason] for reason in SPLITS)
    means = {"lego/branches/mean": reasons.total() / len(rollouts), "lego/branches/split/mean": split / len(rollouts)}
    return means | {f"lego/branches/{reason}": float(number) for reason, number in reasons.items()}


def fidelity_metrics(columns: LogProbs, harness: Sequence[str], rollout: Sequence[int]) -> dict[str, float]:
    """Log-probs at sampling against the trainer's, over all scored rollouts of a step and for each harness of a mixed one.

    `harness` and `rollout` (its number) are per row. Tokens of older weights differ because the policy does: `lagged` says how much. In the
    rest they are compared under their own weights, or left out when that was not computed. What a rollout sampled behind an update that
    it lived through is apart, under `across`: the engine chose experts for the whole context anew, the replayed routes are the older ones.
    verl's correlation of probabilities, which is against the present weights and calls the rounding of a policy that is sure of every token
    a disagreement, is replaced by that of `lego/fidelity`.
    """
    lengths = np.diff(columns.offsets)
    of_token, trajectory = np.repeat(np.asarray(harness), lengths), np.repeat(np.asarray(rollout), lengths)
    trained, lagged = columns.mask.astype(bool), columns.lagged
    same, compared = (columns.trainer, trained & ~lagged) if columns.sampler is None else (columns.sampler, trained)
    first = np.full(max(rollout, default=0) + 1, np.iinfo(np.int32).max)
    np.minimum.at(first, trajectory[trained], columns.versions[trained])
    across = compared & (columns.versions > first[trajectory])
    parts = {"lego/fidelity": (same, compared & ~across)}
    if len(names := sorted(set(harness))) > 1:
        parts |= {f"lego/fidelity/{name}": (same, compared & ~across & (of_token == name)) for name in names}
    parts |= {f"lego/fidelity/{name}": part for name, part in (("lagged", (columns.trainer, lagged)), ("across", (same, across)))}
    metrics = dict[str, float]()
    for prefix, (trainer, mask) in parts.items():
        if prefix.endswith(("/lagged", "/across")) and not mask.any():
            continue
        found = asdict(fidelity(columns.rollout, trainer, mask, trajectory))
        histogram, pearson = found.pop("histogram"), found.pop("pearson_probability")
        if prefix == "lego/fidelity":
            metrics[PEARSON] = pearson
        metrics |= {f"{prefix}/{name}": float(value) for name, value in found.items()}
        bounds = (-math.inf, *EDGES, math.inf)
        metrics |= {f"{prefix}/log_ratio/{low:g}..{high:g}": float(n) for (low, high), n in zip(pairwise(bounds), histogram, strict=True)}
    return metrics
