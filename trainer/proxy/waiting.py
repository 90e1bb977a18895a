"""The gate in front of an engine, on the event loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from trainer.engine.base import KV, Engine, Generation, GenerationRequest, ReportsKV
from trainer.proxy.gate import Call, Gate, Rule


@dataclass(slots=True)
class Waits:
    """Since they were taken last: calls admitted, those of them that waited, all their seconds, the longest wait, the longest queue, and
    calls that passed because they had waited too long."""

    admitted: int = 0
    waited: int = 0
    seconds: float = 0
    longest: float = 0
    queue: int = 0
    forced: int = 0


class Gated:
    """Implements `Engine` over another one. `source` reports the KV; while it has nothing to report, everybody passes."""

    def __init__(self, engine: Engine, source: ReportsKV, rule: Rule) -> None:
        self._engine, self._source = engine, source
        self._gate = Gate(rule)
        self._passes: dict[Call, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.waits, self._past = Waits(), Waits()

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`. A call that is cancelled while it waits leaves the queue."""
        call = await self._enter(request.session, len(request.prompt_ids))
        try:
            return await self._engine.generate(request)
        finally:
            self._gate.done(call, time.monotonic())
            self._move()

    def release(self, session: str) -> None:
        """The rollout is over: its room is free."""
        self._gate.forget(session)
        self._move()

    def take(self) -> Waits:
        """What happened since the last time."""
        taken, self.waits = self.waits, Waits(queue=self._gate.queue)
        taken.forced, self._gate.forced = self._gate.forced, 0
        self._past.waited += taken.waited
        self._past.seconds += taken.seconds
        return taken

    @property
    def waited(self) -> tuple[int, float]:
        """Calls that waited since the start, and all their seconds."""
        return self._past.waited + self.waits.waited, self._past.seconds + self.waits.seconds

    async def _enter(self, session: str, tokens: int) -> Call:
        call = self._gate.arrive(session, tokens, time.monotonic())
        passed = self._passes[call] = asyncio.get_running_loop().create_future()
        self._move()
        if not passed.done():
            self.waits.waited += 1
            try:
                await passed
            except asyncio.CancelledError:
                if self._passes.pop(call, None) is not None:
                    self._gate.give_up(call)
                else:  # it was let in at the same moment
                    self._gate.done(call, time.monotonic())
                self._move()
                raise
            waited = time.monotonic() - call.since
            self.waits.seconds += waited
            self.waits.longest = max(self.waits.longest, waited)
        self.waits.admitted += 1
        return call

    def _move(self) -> None:
        """Let in whoever may pass now, and look again when time may have changed that."""
        now = time.monotonic()
        kv = self._source.kv() or _BOUNDLESS
        for call in self._gate.admit(now, kv):
            self._passes.pop(call).set_result(None)
        self.waits.queue = max(self.waits.queue, self._gate.queue)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (seconds := self._gate.next_change(now)) is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._move)


_BOUNDLESS = KV(capacity=1 << 40, unit=1, held={}, resident={})
