"""One rollout at the proxy: from a request to a turn, with everything that may refuse it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from dataclasses import dataclass

from trainer.capture.capture import Capture
from trainer.capture.graph import Place, Turn, store_routes
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import Request
from trainer.engine.base import Engine, EngineError, Generation, Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.rendering import Rendering

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A model call under way and the number of clients that wait for it."""

    task: asyncio.Task[Turn]
    waiters: int = 0


class Session:
    def __init__(
        self,
        rollout_id: str,
        key: str,
        engine: Engine,
        rendering: Rendering,
        sampling: Sampling,
        limits: Limits,
        harness: str,
    ) -> None:
        self.rollout_id, self.key = rollout_id, key
        self.capture = Capture(harness, limits.context)
        self._engine, self._rendering = engine, rendering
        self._sampling, self._limits = sampling, limits
        self._flights: dict[bytes, Flight] = {}
        self._mint = hashlib.blake2b(rollout_id.encode(), digest_size=5).hexdigest()
        self._minted = 0
        self._closed = False

    async def answer(self, request: Request) -> Turn:
        """The turn for a request: sampled now, joined while it is being sampled, or given again when its answer never got out.

        Cancelling the last waiter cancels the engine call. Raises Refusal.
        """
        self.capture.unknown_fields.update(request.unknown)
        flight = self._flights.get(request.call)
        if flight is None:
            if (turn := self._unsent(request.call)) is not None:
                return turn
            flight = self._take_off(request)
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                raise _closed(self.rollout_id) from None
            raise
        finally:
            flight.waiters -= 1
            if not flight.waiters and flight.task.cancel():
                self._land(request.call, flight)
                self.capture.cancelled += 1

    def count(self, request: Request) -> int:
        """Prompt tokens of a request, by rendering alone: the same body always gives the same number, and nothing is recorded."""
        return len(self._rendering.render(request.messages, request.tools).ids)

    async def close(self) -> Capture:
        self._closed = True
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            self.capture.cancelled += task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.capture

    def _unsent(self, call: bytes) -> Turn | None:
        last = next((turn for turn in reversed(self.capture.graph.turns) if turn.call == call), None)
        return last if last is not None and not last.sent and not last.returned else None

    def _take_off(self, request: Request) -> Flight:
        if self._closed:
            raise _closed(self.rollout_id)
        if self.capture.engine_error or self.capture.proxy_error:
            raise Refusal(Reason.ENDED, "this rollout has failed: its model is no longer available")
        place, stripped = self._place(request)
        tokens = place.end
        if self.capture.policy_turns + len(self._flights) >= self._limits.max_turns:
            self.capture.turn_cap_hit = True
            message = f"the {self._limits.max_turns} turns of this rollout are used up"
            raise Refusal(Reason.TURN_CAP, message, tokens=max(tokens, self._limits.context + 1), limit=self._limits.context)
        room = self._limits.context - tokens
        if room < 1:
            self.capture.over_length = True
            raise Refusal(Reason.OVERFLOW, "the prompt leaves no room for an answer", tokens=tokens, limit=self._limits.context)
        self.capture.over_length = self.capture.turn_cap_hit = False
        limits = [self._sampling.max_tokens, room, *([request.max_tokens] if request.max_tokens else [])]
        sampling = dataclasses.replace(self._sampling, max_tokens=min(limits))
        flight = Flight(asyncio.create_task(self._generate(request, place, sampling, stripped), name=f"turn of {self.rollout_id}"))
        self._flights[request.call] = flight
        flight.task.add_done_callback(lambda _: self._land(request.call, flight))
        return flight

    def _land(self, call: bytes, flight: Flight) -> None:
        if self._flights.get(call) is flight:
            del self._flights[call]

    def _place(self, request: Request) -> tuple[Place, bool]:
        """Render what is new behind the longest known path; a path that cannot be extended exactly is left for a new branch.

        The second value is True when it was the renderer that would not extend it.
        """
        graph, match = self.capture.graph, self.capture.graph.locate(request)
        new, stripped = request.messages[match.position :], False
        if match.turn is not None:
            for turn in match.turn.turns():
                turn.returned = True
            if new and all(message.role != "assistant" for message in new):
                scaffold, sampled = match.turn.ids[: match.turn.scaffold].tolist(), match.turn.sampled.tolist()
                bridged = self._rendering.bridge(scaffold, sampled, new, request.tools)
                if bridged is not None:
                    return graph.place(request, bridged.ids, bridged.ends, match), False
                stripped = True
        rendered = self._rendering.render(request.messages, request.tools)
        return graph.place(request, rendered.ids, rendered.ends, None), stripped

    async def _generate(self, request: Request, place: Place, sampling: Sampling, stripped: bool) -> Turn:
        first = place.routes_from()
        try:
            generation = await self._engine.generate(self.rollout_id, place.prompt(), sampling, first)
            _check(generation)
        except Exception as error:
            # The engine is another room's code: whatever it raises makes the trial Failed(engine) instead of hanging the harness.
            self.capture.engine_error = f"{type(error).__name__}: {error}"
            log.exception("engine call of rollout %s failed", self.rollout_id)
            raise Refusal(Reason.ENDED, "this rollout has failed: its model is no longer available") from error
        parsed = self._rendering.parse(place.scaffold, generation.token_ids, request.tools)
        message = Message(
            "assistant",
            parsed.text,
            tuple(ToolCall(self._next_id(), call.name, call.arguments) for call in parsed.calls),
            reasoning=parsed.reasoning,
        )
        turn = self.capture.graph.add_turn(place, message, generation, request, malformed=parsed.malformed, stripped=stripped)
        if generation.routes is not None and not store_routes(turn, generation.routes, first):
            self.capture.violations.append(
                f"turn {turn.index}: {len(generation.routes)} rows of routes for {turn.end - 1 - first} positions"
            )
        return turn

    def _next_id(self) -> str:
        self._minted += 1
        return f"toolu_{self._mint}{self._minted:06x}"


def _check(generation: Generation) -> None:
    if generation.stop_reason == "aborted" or not generation.token_ids:
        raise EngineError(f"the generation ended without an answer ({generation.stop_reason}, {len(generation.token_ids)} tokens)")
    if len(generation.log_probs) != len(generation.token_ids):
        raise EngineError(f"{len(generation.log_probs)} log-probabilities for {len(generation.token_ids)} tokens")


def _closed(rollout_id: str) -> Refusal:
    return Refusal(Reason.NOT_FOUND, f"rollout {rollout_id} is closed")
