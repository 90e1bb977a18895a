"""The run's own stop rule: a run whose trials fail does not go on training on what is left over.

It acts within a step: with the failure that takes a step or an evaluation past `monitors.failed_share` no further trial begins, since
nothing that the others come to could bring the share down again.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from server.schemas.outcome import Cause, Failed, Scored
from server.schemas.states import Phase
from trainer.launch import FinalError

from .groups import Group


class TooManyFailures(FinalError):
    """The share of failed trials exceeds `monitors.failed_share`."""


class Breaker:
    """Counts the failures of every step and evaluation, by the step that the groups carry. Once open it stays open."""

    def __init__(self, allowed: float, step_size: int, evaluation_size: int) -> None:
        """The sizes are trials of one step and of one evaluation."""
        self._allowed = allowed
        self._sizes = {Phase.TRAIN: step_size, Phase.EVAL: evaluation_size}
        self._failed: defaultdict[tuple[Phase, int], Counter[Cause]] = defaultdict(Counter)
        self._why = ""

    def check(self) -> None:
        """Before a trial begins. Raises TooManyFailures, with the causes and the words of the failure that opened it."""
        if self._why:
            raise TooManyFailures(self._why)

    def note(self, group: Group, trial_id: str, outcome: Scored | Failed) -> None:
        """After a trial has ended. Raises TooManyFailures."""
        if isinstance(outcome, Failed) and not self._why:
            failed = self._failed[group.phase, group.step]
            failed[outcome.cause] += 1
            self._judge(group, failed, trial_id, outcome)
        self.check()

    def _judge(self, group: Group, failed: Counter[Cause], trial_id: str, last: Failed) -> None:
        size = self._sizes[group.phase]
        if failed.total() <= self._allowed * size:
            return
        what = f"step {group.step}" if group.phase is Phase.TRAIN else f"the evaluation after step {group.step}"
        causes = ", ".join(f"{cause} {count}" for cause, count in failed.most_common())
        words = " ".join(last.detail.split())[:200]
        self._why = (
            f"{failed.total()} of {size} trials of {what} failed ({causes}), more than monitors.failed_share = {self._allowed:g} allows;"
            f" the others were not begun. {trial_id}: {words or 'no detail'}. Mend the cause and start a new run"
        )
