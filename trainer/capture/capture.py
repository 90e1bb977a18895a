"""What the proxy hands to the trainer when a rollout is closed."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.schemas.capture import BranchReason, CaptureRecord
from server.schemas.runspec import TrainRule
from trainer.capture import file, samples
from trainer.capture.graph import Graph
from trainer.capture.record import record
from trainer.capture.sample import Sample


@dataclass(eq=False, slots=True, weakref_slot=True)
class Capture:
    """The graph of a rollout and the facts that admission needs.

    `turn_cap_hit` and `over_length` say that the last call of the rollout was refused, or its answer cut off, for that reason.
    `engine_error` and `proxy_error` make the trial `Failed`: they hold one line for a person. `cancelled` counts calls whose client
    went away before the engine answered, `cancelled_tokens` what the engine had streamed of them: such a call leaves no turn.
    `lost_tokens` were streamed by calls that the engine then failed for good, and are in no turn either.
    A capture stays in its process; what travels is `samples()`, `record()` and `to_bytes()`.
    """

    harness: str
    context: int
    graph: Graph = field(default_factory=Graph)
    turn_cap_hit: bool = False
    over_length: bool = False
    engine_error: str | None = None
    proxy_error: str | None = None
    cancelled: int = 0
    cancelled_tokens: int = 0
    lost_tokens: int = 0
    unknown_fields: set[str] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    @property
    def policy_turns(self) -> int:
        """Model calls that the engine answered."""
        return len(self.graph.turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled) for turn in self.graph.turns)

    @property
    def malformed_turns(self) -> int:
        """Turns with a block that is no tool call, and turns that the harness dropped."""
        dropped = {branch.owned[0].index for branch in self.branches() if branch.reason is BranchReason.MALFORMED_TURN}
        return len(dropped | {turn.index for turn in self.graph.turns if turn.malformed})

    def branches(self, rule: TrainRule = TrainRule.ALL_BRANCHES) -> list[samples.Branch]:
        return samples.branches(self.graph.turns, self.context, rule)

    def samples(self, rule: TrainRule = TrainRule.ALL_BRANCHES) -> list[Sample]:
        """One per branch, trained or excluded with its reason. Empty when the engine never answered."""
        like = next((node.routes[:0] for node in self.graph.nodes() if node.routes is not None), None)
        return [samples.sample(branch, like) for branch in self.branches(rule)]

    def record(self, trial_id: str, rule: TrainRule = TrainRule.ALL_BRANCHES) -> CaptureRecord:
        return record(self, trial_id, rule)

    def to_bytes(self, trial_id: str, rule: TrainRule = TrainRule.ALL_BRANCHES) -> bytes:
        """The capture file, which `trainer.capture.file.read` opens again bit for bit."""
        return file.to_bytes(self, trial_id, rule)
