"""What a rollout may use. Everything is decided by the RunSpec; a client can only ask for less."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """`context` is the longest sequence in tokens (prompt and answer together), `max_turns` the number of answers that the policy gives."""

    max_turns: int
    context: int
