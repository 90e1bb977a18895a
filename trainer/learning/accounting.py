"""Token accounting: every sampled token of a scored trial is trained or listed under a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from server.schemas.capture import Exclusion
from trainer.capture.sample import Sample


class AccountingError(Exception):
    """Sampled tokens are not the sum of trained and excluded ones: tokens were lost or counted twice."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Invariant: `sampled` = `trained` + sum of `excluded`. Accounts add up over rollouts, groups and steps."""

    sampled: int = 0
    trained: int = 0
    excluded: Mapping[Exclusion, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = sum(self.excluded.values())
        if min(self.sampled, self.trained, *self.excluded.values(), 0) < 0:
            raise AccountingError(f"negative token count: {self}")
        if self.sampled != self.trained + listed:
            reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(self.excluded.items())) or "none"
            raise AccountingError(
                f"{self.sampled} tokens were sampled but {self.trained} are trained and {listed} excluded ({reasons}): "
                f"{self.sampled - self.trained - listed} are unaccounted for"
            )

    def __add__(self, other: TokenAccount) -> TokenAccount:
        excluded = dict(self.excluded)
        for reason, number in other.excluded.items():
            excluded[reason] = excluded.get(reason, 0) + number
        return TokenAccount(self.sampled + other.sampled, self.trained + other.trained, excluded)


def rollout_account(sampled: int, samples: Iterable[Sample], untrained: Exclusion | None = None) -> TokenAccount:
    """Account of one scored rollout. `sampled` is what the engine says it sampled, `samples` what the capture made of it.

    A sample with `excluded` set counts under that reason. `untrained` is the reason when nothing of the rollout is
    trained. Raises AccountingError when the masks do not cover the sampled tokens exactly once.
    """
    trained = 0
    excluded: dict[Exclusion, int] = {}
    for sample in samples:
        number = int(sample.mask.sum())
        reason = sample.excluded if sample.excluded is not None else untrained
        if reason is None:
            trained += number
        elif number:
            excluded[reason] = excluded.get(reason, 0) + number
    return TokenAccount(sampled, trained, excluded)


def step_account(rollouts: Iterable[TokenAccount]) -> TokenAccount:
    """Sum of a step's rollouts."""
    return sum(rollouts, TokenAccount())
