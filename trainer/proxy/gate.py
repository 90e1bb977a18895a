"""Which session may take room in the engine's KV cache now: a pure state machine that is told the time and what the engine holds.

A rollout asks the engine again and again with a growing prompt, and pays for the whole prompt whenever its KV was given up for another
rollout's meanwhile. With more rollouts than the cache holds, everybody evicts everybody. So new rollouts wait at a watermark:

* a session *owns* its KV while a call of it runs and for an ownership window behind its last one (an agent's command takes that long);
* an owner passes, and so does a session whose prefix is still resident: neither takes room from anybody;
* any other call passes when the owned KV and what it needs stay below the watermark, and nobody waits ahead of it;
* whoever has waited for the longest time allowed passes in any case, and the first one passes when nobody owns anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.engine.base import KV


@dataclass(frozen=True, slots=True)
class Rule:
    """`watermark` is a share of the capacity, `resident` the share of a prompt that must be cached to pass, times are seconds."""

    watermark: float
    resident: float
    ownership: float
    longest_wait: float


@dataclass(eq=False, slots=True)
class Call:
    """One call at the gate."""

    session: str
    tokens: int
    since: float


class Gate:
    """Invariant: a call is waiting, or running until `done`. Sessions are known from their first call to `forget`."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._waiting: list[Call] = []  # in order of arrival
        self._running: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._needs: dict[str, int] = {}
        self.forced = 0
        """Calls that passed because they had waited too long."""

    @property
    def queue(self) -> int:
        return len(self._waiting)

    def arrive(self, session: str, tokens: int, now: float) -> Call:
        """A call with a prompt of `tokens`. It waits until `admit` names it."""
        call = Call(session, tokens, now)
        self._waiting.append(call)
        return call

    def admit(self, now: float, kv: KV) -> list[Call]:
        """The calls that may run from now on, in order."""
        admitted = []
        for call in self._waiting.copy():
            if self._passes(call, now, kv):
                self._waiting.remove(call)
                self._running[call.session] = self._running.get(call.session, 0) + 1
                self._needs[call.session] = math.ceil(call.tokens / kv.unit)
                admitted.append(call)
        return admitted

    def give_up(self, call: Call) -> None:
        """A waiting call was cancelled."""
        self._waiting.remove(call)

    def done(self, call: Call, now: float) -> None:
        """An admitted call ended; its session owns its KV for the window."""
        left = self._running.pop(call.session) - 1
        if left:
            self._running[call.session] = left
        self._last[call.session] = now

    def forget(self, session: str) -> None:
        """The rollout is over."""
        self._last.pop(session, None)
        self._needs.pop(session, None)

    def next_change(self, now: float) -> float | None:
        """Seconds until time alone may let somebody pass; None when nobody waits."""
        if not self._waiting:
            return None
        ends = [self._waiting[0].since + self._rule.longest_wait]
        ends += [last + self._rule.ownership for session, last in self._last.items() if session not in self._running]
        return max(0.0, min(ends) - now)

    def _passes(self, call: Call, now: float, kv: KV) -> bool:
        owners = set(self._owners(now))
        if call.session in owners or not owners:
            return True
        if kv.resident.get(call.session, 0) >= max(1, self._rule.resident * call.tokens):
            return True
        if now - call.since >= self._rule.longest_wait:
            self.forced += 1
            return True
        owned = sum(max(self._needs.get(session, 1), kv.held.get(session, 0)) for session in owners)
        return call is self._waiting[0] and owned + math.ceil(call.tokens / kv.unit) <= self._rule.watermark * kv.capacity

    def _owners(self, now: float) -> Iterator[str]:
        yield from self._running
        for session, last in list(self._last.items()):
            if now - last < self._rule.ownership:
                yield session
            elif session not in self._running:
                del self._last[session]
