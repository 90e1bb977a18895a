"""What a replayed recording became."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from server.schemas.capture import BranchClass, BranchReason
from server.schemas.runspec import TrainRule
from trainer.capture import samples
from trainer.replay.audit import violations
from trainer.replay.play import Played


@dataclass(frozen=True)
class Report:
    """What one recording became. `skipped` exchanges would not have happened behind this proxy. `threads` are conversations that began
    as the rollout's own or as a sub-agent's; `policy_turns` are turns that are no auxiliary call's."""

    file: str
    exchanges: int
    skipped: int
    threads: int
    branches: int
    reasons: dict[str, int]
    classes: dict[str, int]
    policy_turns: int
    undelivered: int
    sampled_tokens: int
    trained_tokens: int
    violations: list[str]

    @property
    def line(self) -> str:
        counts = ", ".join(f"{n} {reason}" for reason, n in self.reasons.items())
        head = (
            f"{self.file}: {self.exchanges} exchanges ({self.skipped} skipped), {self.threads} threads, "
            f"{self.branches} branches ({counts}), {self.policy_turns} policy turns ({self.undelivered} undelivered), "
            f"{self.trained_tokens} of {self.sampled_tokens} tokens trained"
        )
        return "\n".join([head, *(f"  violation: {problem}" for problem in self.violations)])


def report(played: Played, rule: TrainRule) -> Report:
    """Checks every promise of the capture and counts it under one rule of training."""
    capture = played.capture
    branches = capture.branches(rule)
    own = [branch for branch in branches if branch.branch_class in (BranchClass.POLICY, BranchClass.SUB_AGENT)]
    return Report(
        file=f"{played.path.parent.name}/{played.path.stem}",
        exchanges=played.exchanges,
        skipped=played.skipped,
        threads=sum(branch.reason in (BranchReason.ROOT, BranchReason.SUB_AGENT) for branch in own),
        branches=len(branches),
        reasons=dict(sorted(Counter(str(branch.reason) for branch in branches).items())),
        classes=dict(sorted(Counter(str(branch.branch_class) for branch in branches).items())),
        policy_turns=sum(len(branch.owned) for branch in branches if branch.branch_class is not BranchClass.AUXILIARY),
        undelivered=len(samples.undelivered(capture.graph.turns)),
        sampled_tokens=capture.sampled_tokens,
        trained_tokens=sum(len(turn.sampled) for branch in branches if not branch.excluded for turn in branch.owned),
        violations=[*played.problems, *violations(capture, played.calls, rule)],
    )
