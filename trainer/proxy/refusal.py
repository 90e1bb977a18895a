"""How the proxy says no. A `Refusal` carries the reason; each dialect turns it into its own status and words."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    SLOW = "slow"
    BUSY = "busy"
    """Too many calls at the same time; a later one may be served."""
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    """No such path, no such rollout, or one that is closed."""
    OVERFLOW = "overflow"
    """The prompt leaves no room for an answer."""
    TURN_CAP = "turn_cap"
    """The rollout has used its turns; said in the words of an overflow, which every harness takes as its own end."""
    ENDED = "ended"
    """The engine or the proxy failed: the trial is lost and no retry can help."""


class Refusal(Exception):
    def __init__(self, reason: Reason, message: str, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.reason, self.message, self.tokens, self.limit = reason, message, tokens, limit
