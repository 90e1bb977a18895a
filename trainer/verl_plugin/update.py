"""What one step trains: advantages, row weights, mini-batches and the account of every sampled token. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from server.schemas.capture import Exclusion
from server.schemas.outcome import Failed
from server.schemas.runspec import Algorithm
from trainer.capture.sample import Sample
from trainer.learning.accounting import TokenAccount, rollout_account, step_account
from trainer.learning.advantages import group_advantages
from trainer.learning.minibatches import partition
from trainer.learning.weights import branch_weights, row_factors, token_factors
from trainer.rollout.manager import PlayedGroup
from trainer.rollout.rows import row_key, trained_samples
from trainer.verl_plugin.metrics import branch_metrics


@dataclass(frozen=True, slots=True)
class Row:
    """One branch of a rollout with a gradient. `weight` is the advantage times the row's `factor`, `share` |M_b| / |M(τ)|."""

    key: str
    rollout: int
    tokens: int
    weight: float
    factor: float
    share: float
    minibatches: tuple[int, ...]
    """Number of its mini-batch in each epoch."""


@dataclass(frozen=True, slots=True)
class StepUpdate:
    rows: list[Row]
    account: TokenAccount
    metrics: dict[str, float]


def plan_update(
    played: Sequence[PlayedGroup],
    algorithm: Algorithm,
    seed: int,
    *,
    version: int = 0,
    stale: Sequence[PlayedGroup] = (),
    groups: int | None = None,
) -> StepUpdate:
    """Rows of the rollouts whose group has signal; everything else is listed in the account with its reason.

    `version` is that of the weights the step trains; `stale` are the groups dropped before it, which count in the account only. `groups` is
    the number of those in the whole step when `played` is a part of it.

    With a KL term every scored rollout has rows, those without signal with weight 0: what holds the policy back is no signal, and their
    tokens stay listed as `zero_advantage`.
    """
    accounts: list[TokenAccount] = []
    keys: list[str] = []
    owners: list[int] = []
    tokens: list[int] = []
    shares: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    without_signal: Counter[str] = Counter()
    trainable = 0

    for group in played:
        statistics = group_advantages([rollout.reward for rollout in group.rollouts], algorithm.normaliser)
        if statistics.no_signal:
            without_signal[statistics.no_signal] += 1
        for member, rollout in enumerate(group.rollouts):
            if isinstance(rollout.outcome, Failed):
                continue
            advantage = float(statistics.advantages[member])
            accounts.append(rollout_account(rollout.sampled, rollout.samples, None if advantage else Exclusion.ZERO_ADVANTAGE))
            counts = [int(sample.mask.sum()) for sample in trained_samples(rollout)]
            trainable += sum(counts)
            if not counts or (advantage == 0 and not algorithm.kl):
                continue
            owners.extend([len(advantages)] * len(counts))
            tokens.extend(counts)
            shares.extend(branch_weights(counts).tolist())
            keys.extend(row_key(group.group.uid, rollout.sample, branch) for branch in range(len(counts)))
            advantages.append(advantage)
            weights.append(float(statistics.weights[member]))

    if algorithm.loss == "ppo":
        factors = token_factors(owners, tokens, total=max(trainable, 1), minibatches=algorithm.minibatches, global_batch_size=1)
    else:
        factors = row_factors(owners, tokens, weights, groups=groups or len(played), minibatches=algorithm.minibatches, global_batch_size=1)
    batches = _minibatches(owners, tokens, len(advantages), algorithm.epochs, algorithm.minibatches, seed)
    rows = [
        Row(key, owner, count, advantages[owner] * factor, factor, share, batches[owner])
        for key, owner, count, factor, share in zip(keys, owners, tokens, factors.tolist(), shares, strict=True)
    ]
    gone = [rollout for group in stale for rollout in group.rollouts if not isinstance(rollout.outcome, Failed)]
    account = step_account([*accounts, *(rollout_account(rollout.sampled, rollout.samples, Exclusion.STALE) for rollout in gone)])
    metrics = _metrics(played, account, without_signal) | lag_metrics(played, version) | {"lego/stale/groups": float(len(stale))}
    if stale:
        size = sum(group.group.size for group in stale)
        metrics |= {"lego/stale/rollouts": float(len(gone)), "lego/stale/rollouts_cut": float(size - sum(len(g.rollouts) for g in stale))}
    return StepUpdate(rows, account, metrics)


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Of the rows that verl holds: harness and rollout number of each, and the version that sampled each token behind its prompt."""

    harnesses: list[str]
    rollouts: list[int]
    versions: NDArray[np.int32]


def row_owners(keys: Sequence[str], played: Sequence[PlayedGroup]) -> RowOwners:
    """In the order of `keys`."""
    rollouts = ((group.group, rollout) for group in played for rollout in group.rollouts)
    owners = {
        row_key(group.uid, rollout.sample, branch): (group.harness, number, sample.versions[sample.prompt_len :])
        for number, (group, rollout) in enumerate(rollouts)
        for branch, sample in enumerate(trained_samples(rollout))
    }
    harnesses, numbers, versions = zip(*(owners[key] for key in keys), strict=True)
    return RowOwners(list(harnesses), list(numbers), np.concatenate(versions))


def lag_metrics(played: Sequence[PlayedGroup], version: int) -> dict[str, float]:
    """How many updates older than the step's weights the policy was that sampled: tokens of each lag, and each rollout's oldest token."""
    samples = [trained_samples(rollout) for group in played for rollout in group.rollouts]
    lags = [version - np.concatenate([sample.versions[sample.mask] for sample in branches]) for branches in samples if branches]
    if not lags:
        return {}
    tokens = Counter(np.concatenate(lags).tolist())
    oldest = [int(lag.max()) for lag in lags]
    spans = sum(len(np.unique(lag)) > 1 for lag in lags)
    metrics = {f"lego/lag/tokens/{lag}": float(number) for lag, number in sorted(tokens.items())}
    return metrics | {"lego/lag/mean": float(np.mean(oldest)), "lego/lag/max": float(max(oldest)), "lego/lag/rollouts_across": float(spans)}


def _minibatches(
    owners: Sequence[int], tokens: Sequence[int], rollouts: int, epochs: int, minibatches: int, seed: int
) -> list[tuple[int, ...]]:
    """Mini-batch of each rollout in each epoch, drawn anew per epoch."""
    totals = [0] * rollouts
    for owner, count in zip(owners, tokens, strict=True):
        totals[owner] += count
    places: list[list[int]] = [[0] * epochs for _ in range(rollouts)]
    for epoch in range(epochs):
        for number, members in enumerate(partition(totals, minibatches, seed * epochs + epoch)):
            for rollout in members:
                places[rollout][epoch] = number
    return [tuple(place) for place in places]


def _metrics(played: Sequence[PlayedGroup], account: TokenAccount, without_signal: Counter[str]) -> dict[str, float]:
    rollouts = [rollout for group in played for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    failed = Counter(rollout.outcome.cause for rollout in rollouts if isinstance(rollout.outcome, Failed))
    metrics = {
        "lego/trials": len(rollouts),
        "lego/scored": len(rewards),
        "lego/failed": failed.total(),
        "lego/groups": len(played),
        "lego/groups_with_signal": len(played) - without_signal.total(),
        "lego/sampled_tokens": account.sampled,
        "lego/trained_tokens": account.trained,
        "lego/turns/mean": sum(rollout.turns for rollout in rollouts) / max(1, len(rollouts)),
    }
    metrics |= harness_metrics(played)
    metrics |= branch_metrics([rollout.samples for rollout in rollouts if rollout.samples])
    metrics |= _coverage([sample for rollout in rollouts for sample in rollout.samples if sample.routes is not None])
    metrics |= {f"lego/excluded_tokens/{reason}": number for reason, number in account.excluded.items()}
    metrics |= {f"lego/failed/{cause}": number for cause, number in failed.items()}
    metrics |= {f"lego/no_signal/{reason}": number for reason, number in without_signal.items()}
    if rewards:
        metrics["lego/reward/mean"] = sum(rewards) / len(rewards)
    return {name: float(value) for name, value in metrics.items()}


def harness_metrics(played: Sequence[PlayedGroup]) -> dict[str, float]:
    """What a mixed step came to in each harness: reward, failures, turns and outcomes. Nothing when all rollouts had the same one."""
    names = sorted({group.group.harness for group in played})
    metrics: dict[str, float] = {}
    for name in names if len(names) > 1 else ():
        groups = [group for group in played if group.group.harness == name]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        outcomes = Counter(r.outcome.cause if isinstance(r.outcome, Failed) else r.outcome.termination for r in rollouts)
        counts = {"groups": len(groups), "trials": len(rollouts), "failed": len(rollouts) - len(rewards)}
        counts |= {f"outcome/{outcome}": number for outcome, number in outcomes.items()}
        metrics |= {f"lego/harness/{name}/{what}": float(number) for what, number in counts.items()}
        metrics[f"lego/harness/{name}/turns/mean"] = sum(rollout.turns for rollout in rollouts) / len(rollouts)
        if rewards:
            metrics[f"lego/harness/{name}/reward/mean"] = sum(rewards) / len(rewards)
    return metrics


def _coverage(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of input tokens with a recorded route, over all and per tenth of a branch's length; the others are routed natively.

    A buffer that is too small loses the ends of long sequences, which the whole hides and the last tenths show. The last token of a
    branch is never an input and is not counted.
    """
    routed = [sample.routed[:-1] for sample in samples if len(sample.routed) > 1]
    if not routed:
        return {"lego/routing/missing": 0}
    flags = np.concatenate(routed)
    tenth = np.concatenate([np.arange(len(row)) * 10 // len(row) for row in routed])
    held, total = np.bincount(tenth, flags, minlength=10), np.bincount(tenth, minlength=10)
    deciles = {f"lego/routing/coverage/decile_{i + 1}": held[i] / total[i] for i in range(10) if total[i]}
    return {"lego/routing/missing": len(flags) - held.sum(), "lego/routing/coverage": flags.mean()} | deciles
