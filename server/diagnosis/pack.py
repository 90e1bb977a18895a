"""The evidence pack: what the detectors may look at, as plain data. `evidence.py` fills it from SQL."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.schemas.outcome import Failed, Scored, admission


@dataclass(frozen=True, slots=True)
class TrialFacts:
    """One ended trial. `tool_calls` is None when no capture was stored."""

    trial_id: str
    group_id: str
    step: int
    outcome: Scored | Failed
    turns: int | None = None
    tool_calls: int | None = None


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The ended trials of one (task, harness) in one step."""

    group_id: str
    task: str
    step: int
    trials: tuple[TrialFacts, ...]

    @property
    def rewards(self) -> list[int]:
        return [t.outcome.reward for t in self.trials if isinstance(t.outcome, Scored)]

    @property
    def without_signal(self) -> bool:
        """All scored members got the same reward, so no advantage differs from zero."""
        return len(self.rewards) >= 2 and len(set(self.rewards)) == 1


@dataclass(frozen=True, slots=True)
class Pack:
    """Training groups and evaluation groups of a run, each in step order."""

    run_id: str
    groups: tuple[GroupFacts, ...] = field(default=())
    evaluations: tuple[GroupFacts, ...] = field(default=())

    def sections(self) -> dict[str, list[TrialFacts]]:
        """Ended trials by evidence id: `step:N` of training, `eval:N` of the evaluation after N steps."""
        found: dict[str, list[TrialFacts]] = {}
        for prefix, groups in (("step", self.groups), ("eval", self.evaluations)):
            for group in groups:
                found.setdefault(f"{prefix}:{group.step}", []).extend(group.trials)
        return {label: trials for label, trials in found.items() if trials}

    def by_step(self) -> dict[int, list[GroupFacts]]:
        steps: dict[int, list[GroupFacts]] = {}
        for group in self.groups:
            steps.setdefault(group.step, []).append(group)
        return dict(sorted(steps.items()))


def failed_of(trials: list[TrialFacts]) -> list[tuple[TrialFacts, Failed]]:
    return [(t, t.outcome) for t in trials if isinstance(t.outcome, Failed) and not admission(t.outcome).trained]
