"""The trainer's own stop rule: a run whose trials fail for reasons of infrastructure does not go on training on what is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from server.schemas.outcome import Failed
from trainer.launch import FinalError
from trainer.rollout.manager import PlayedGroup


class TooManyFailures(FinalError):
    """The share of failed trials exceeds `monitors.failed_share`."""


def check_failures(played: Iterable[PlayedGroup], what: str, allowed: float) -> None:
    """Raises TooManyFailures when more than `allowed` of the trials of `what` failed, with their causes and one failure's own words."""
    rollouts = [rollout for group in played for rollout in group.rollouts]
    failed = {rollout.trial_id: rollout.outcome for rollout in rollouts if isinstance(rollout.outcome, Failed)}
    if len(failed) <= allowed * len(rollouts):
        return
    causes = ", ".join(f"{cause} {count}" for cause, count in Counter(outcome.cause for outcome in failed.values()).most_common())
    trial_id, first = next(iter(failed.items()))
    words = " ".join(first.detail.split())[:200]
    raise TooManyFailures(
        f"{len(failed)} of {len(rollouts)} trials of {what} failed ({causes}), more than monitors.failed_share = {allowed:g} allows."
        f" {trial_id}: {words or 'no detail'}. Mend the cause and start a new run"
    )
