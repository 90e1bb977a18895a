"""An engine that gives the recorded turns, breaks down where the recording broke down, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from trainer.engine.base import EngineError, EngineUnavailable, Generation, GenerationRequest, StopReason
from trainer.replay.plan import Step
from trainer.replay.tokenizer import Spelling
from trainer.replay.turns import sampled

PATIENCE_S = 5
"""How long an answer waits for the requests that were recorded while it was under way, should the proxy keep one of them back."""


@dataclass(eq=False, repr=False)
class Call:
    """A step at the engine. `prompt` is what the proxy sent first, `ids` what it gets in the end; an abandoned call has no turn."""

    step: Step
    ids: list[int]
    prompt: list[int] = field(default_factory=list)
    given: int = 0
    """Ids that went out before a fault."""
    faults: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    completed: bool = False

    def log_probs(self) -> list[float]:
        return [-0.01 * (1 + (31 * self.step.exchange.i + position) % 97) for position in range(len(self.ids))]


class RecordedEngine:
    """An `Engine` for many recordings at once, each a rollout of its own."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._scripts: dict[str, Script] = {}

    def script(self, session: str) -> Script:
        return self._scripts.setdefault(session, Script(self._spelling))

    async def release(self, session: str) -> None:
        self._scripts.pop(session, None)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises EngineUnavailable for a recorded fault, EngineError for a call that no recorded request explains."""
        return await self._scripts[request.session].generate(request)


class Script:
    """One recording. `expect` names the call that comes next: requests are begun one at a time, so a new prompt is the newest one's."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self.calls: dict[int, Call] = {}
        self._next: Call | None = None
        self.unexpected: list[str] = []

    def prepare(self, step: Step) -> Call:
        call = self.calls[step.exchange.i] = Call(step, sampled(step, self._spelling), faults=step.faults)
        return call

    def expect(self, call: Call) -> None:
        self._next = call
        call.launched.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        prompt, room, on_tokens = np.asarray(request.prompt_ids).tolist(), request.sampling.max_tokens, request.on_tokens
        call = self._of(prompt)
        offset = len(prompt) - len(call.prompt)
        call.arrived.set()
        await self._recorded_meantime(call)
        if call.faults:
            call.faults -= 1
            if call.step.faults_late and on_tokens is not None and not call.given:
                call.given = len(call.ids) // 2
                on_tokens(call.ids[: call.given], call.log_probs()[: call.given])
                await asyncio.sleep(0)
            raise EngineUnavailable(f"recorded fault of exchange {call.step.exchange.i}")
        ids, log_probs = call.ids[offset:], call.log_probs()[offset:]
        stop: StopReason = "length" if call.step.by_length else "stop"
        if len(ids) > room:
            self.unexpected.append(f"exchange {call.step.exchange.i}: {len(ids)} sampled tokens, but room for {room}")
        if on_tokens is not None:
            for start in range(0, len(ids), 16):
                on_tokens(ids[start : start + 16], log_probs[start : start + 16])
        call.completed = True
        return Generation(ids, log_probs, None, stop, 0)

    def _of(self, prompt: list[int]) -> Call:
        if self._next is not None:
            call, self._next = self._next, None
            call.prompt = prompt
            return call
        for call in self.calls.values():
            behind = prompt[len(call.prompt) :]
            if (
                call.arrived.is_set()
                and not call.completed
                and prompt[: len(call.prompt)] == call.prompt
                and behind == call.ids[: len(behind)]
            ):
                return call
        self.unexpected.append(f"the engine was asked for {len(prompt)} tokens that no recorded request explains")
        raise EngineError(self.unexpected[-1])

    async def _recorded_meantime(self, call: Call) -> None:
        """Hold the answer until the requests that were recorded while it was under way have begun; for ever when the client hangs up."""
        if call.step.hangs_up:
            await asyncio.Event().wait()
        waiting = [self.calls[step.exchange.i].launched.wait() for step in call.step.meanwhile if step.exchange.i in self.calls]
        if waiting:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.gather(*waiting)
            except TimeoutError:
                self.unexpected.append(f"exchange {call.step.exchange.i} waited {PATIENCE_S} s for a request that did not begin")
