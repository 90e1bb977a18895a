"""What a rollout may use, and how long the proxy waits. A client can only ask for less."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY = 32 * 1024 * 1024
MAX_NAME = 256
"""Characters of a model's name, which is echoed with every event, and of a field's, which is logged."""
MAX_UNKNOWN = 200
"""Names of unknown fields that are recorded in a run."""
MAX_HEAD = 64 * 1024
"""Bytes of request line and headers together."""
MAX_CONNECTIONS = 4096
"""Of all clients together; one more is closed at once."""
MAX_PIPELINED = 16
"""Requests on one connection that wait for the answer to an earlier one; a client that sends more is closed at once."""
MAX_CLOSED = 20_000
"""Rollouts whose end is remembered, so that a client that comes late is told so."""
MAX_CALLS = 256
"""Requests of one rollout that are served at the same time."""

MAX_COUNTS = 32
"""Different bodies of a rollout whose tokens are counted before the model is called again. Claude Code counts a file that is long."""
MAX_UNANSWERED = 64
"""Calls of a rollout in a row that were refused or given up: what they asked is kept until the rollout ends."""


@dataclass(frozen=True, slots=True)
class Limits:
    """All counts are tokens except `max_turns` and `idle_turns`; None is no limit beyond `context`.

    Whatever is used up, the next call is refused in the client's own words for a conversation that is too long: nothing is ever said in
    the policy's name.
    """

    max_turns: int
    """Answers of the policy."""
    context: int
    """Longest sequence, prompt and answer together."""
    prompt: int | None = None
    """Longest prompt of the call that opens the rollout."""
    response: int | None = None
    """Longest rest of a conversation behind its first prompt, sampled and observed together."""
    budget: int | None = None
    """Sampled tokens of the whole rollout."""
    idle_turns: int | None = None
    """Answers in a row without a tool call, within one conversation."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds, and how often an engine call is made."""

    keep_alive: float = 15
    """Longest silence in a stream. Claude Code and its kind give up after 300."""
    head: float = 60
    """Until a new connection has sent the head of its first request."""
    body: float = 60
    """Until the whole request has arrived."""
    write: float = 300
    """A client that takes nothing for this long is gone."""
    attempts: int = 6
    """Engine calls in a row that may fail without a new token before the rollout is lost."""
    backoff: float = 0.5
    """Before the second of them; doubled each time, up to `longest_backoff`."""
    longest_backoff: float = 8

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, at least 1."""
        return min(self.backoff * 2.0 ** (failures - 1), self.longest_backoff)
