"""One rollout at the proxy: from a request to a turn, with everything that may refuse it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import math
import time

from trainer.capture.capture import Capture
from trainer.capture.graph import Node, Place, Turn, store_routes
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import Request, Tools
from trainer.engine.base import Engine, EngineError, Generation, GenerationRequest, Sampling
from trainer.proxy import placing
from trainer.proxy.allowance import allowance, check_rollout
from trainer.proxy.dialects.reader import Reader
from trainer.proxy.flight import Flight
from trainer.proxy.limits import MAX_CALLS, MAX_COUNTS, MAX_UNANSWERED, Limits
from trainer.proxy.refusal import Reason, Refusal
from trainer.proxy.rendering import Rendering

log = logging.getLogger(__name__)


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
        self.reader = Reader()
        self.capture = Capture(harness, limits.context)
        self._engine, self._rendering = engine, rendering
        self._sampling, self._limits = sampling, limits
        self._flights: dict[bytes, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[bytes, Turn] = {}
        """The newest answer to each call."""
        self._counts: dict[bytes, int] = {}
        """Counted since the last answer."""
        self._sampled = self._unanswered = 0
        self._mint = hashlib.blake2b(rollout_id.encode(), digest_size=5).hexdigest()
        self._minted = self._answered = 0
        self._routed = self._closed = False

    async def answer(self, request: Request) -> Turn:
        """The turn for a request, as `board` finds it. Cancelling the last waiter cancels the engine call. Raises Refusal."""
        flight = self.board(request)
        try:
            return await flight.turn()
        finally:
            self.leave(flight)

    def board(self, request: Request) -> Flight:
        """The call for a request: made now, joined while it is under way, or the stored answer when that never got out.

        Whoever boards must `leave`. Raises Refusal.
        """
        if self._closed:
            raise _closed(self.rollout_id)
        if sum(flight.waiters for flight in self._flights.values()) >= MAX_CALLS:
            raise Refusal(Reason.BUSY, f"more than {MAX_CALLS} calls of this rollout at the same time")
        flight = self._flights.get(request.call) or self._stored(request.call) or self._take_off(request)
        flight.waiters += 1
        return flight

    def leave(self, flight: Flight) -> None:
        """A client has its answer, or went away. The last one to go away takes the call with it: nobody will read that turn."""
        flight.waiters -= 1
        if not flight.waiters:
            self._cancel(flight)

    def next_answer_id(self) -> str:
        """Unique within the rollout, also for a stored answer that is given again: Claude Code takes two answers of one id for one."""
        self._answered += 1
        return f"{self._mint}{self._answered:06x}"

    def count(self, request: Request) -> int:
        """Prompt tokens of a request, by rendering alone: the same body always gives the same number, and nothing is recorded.

        Raises Refusal(BUSY) for more than MAX_COUNTS bodies since the last answer, because counting holds up every other rollout.
        """
        known = self._counts.get(request.call)
        if known is None:
            if len(self._counts) >= MAX_COUNTS:
                raise Refusal(Reason.BUSY, f"more than {MAX_COUNTS} counts of tokens without a call of the model between them")
            known = self._overlong(request) or len(self._rendering.render(request.messages, request.tools).ids)
            self._counts[request.call] = known
        return known

    async def close(self) -> Capture:
        self._closed = True
        for flight in list(self._flights.values()):
            self._cancel(flight)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.capture.graph.rest()
        return self.capture

    def _cancel(self, flight: Flight) -> None:
        if flight.cancel(_closed(self.rollout_id)):
            self._flights.pop(flight.call, None)
            if flight.node is not None:
                self._prune(flight.node)
            self._sampled += len(flight.tokens)
            self._unanswered += 1
            self.capture.cancelled += 1
            self.capture.cancelled_tokens += len(flight.tokens)

    def _prune(self, node: Node) -> None:
        self.capture.graph.prune(node, [flight.node for flight in self._flights.values() if flight.node is not None])

    def _overlong(self, request: Request) -> int:
        tools = request.tools.text if isinstance(request.tools, Tools) else ""
        return self._rendering.overlong(request.messages, tools, self._limits.context)

    def _stored(self, call: bytes) -> Flight | None:
        turn = self._answers.get(call)
        return Flight.over(turn) if turn is not None and not turn.sent and not turn.returned else None

    def _take_off(self, request: Request) -> Flight:
        if self.capture.engine_error or self.capture.proxy_error:
            raise _lost()
        if self._unanswered >= MAX_UNANSWERED:
            raise Refusal(Reason.ENDED, f"{MAX_UNANSWERED} calls in a row were refused or given up")
        try:
            place, room = self._place(request)
        except Refusal as refusal:
            self._unanswered += 1
            self.capture.turn_cap_hit = refusal.reason is Reason.TURN_CAP
            self.capture.over_length = refusal.reason is Reason.OVERFLOW
            raise
        self.capture.over_length = self.capture.turn_cap_hit = False
        most = min(self._sampling.max_tokens, room, request.max_tokens or room)
        sampling = self._sampling if most == self._sampling.max_tokens else dataclasses.replace(self._sampling, max_tokens=most)
        flight = self._flights[request.call] = Flight(request.call, place.end, place.scaffold)
        flight.node = place.node
        task = flight.take_off(lambda: self._generate(request, place, sampling, flight), f"turn of {self.rollout_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._land(flight, task))
        return flight

    def _place(self, request: Request) -> tuple[Place, int]:
        """Where the call hangs, and how many tokens it may sample there."""
        graph = self.capture.graph
        try:
            check_rollout(self._limits, self.capture.policy_turns + len(self._flights), self._sampled)
            if tokens := self._overlong(request):
                raise Refusal(Reason.OVERFLOW, "the prompt leaves no room for an answer", tokens=tokens, limit=self._limits.context)
        except Refusal:
            graph.returned(request, graph.locate(request))  # a call that is refused proves what came before it, too
            raise
        place = placing.place(graph, self._rendering, request)
        try:
            return place, allowance(self._limits, place, self._sampled, opens=self._opens(request))
        except Refusal:
            self._prune(place.node)
            raise

    def _opens(self, request: Request) -> bool:
        """Nothing was answered before but calls without tools, such as for a title, if this one has any."""
        return not any(turn.tools or not request.tools_key for turn in self.capture.graph.turns)

    def _land(self, flight: Flight, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._flights.get(flight.call) is flight:
            del self._flights[flight.call]

    async def _generate(self, request: Request, place: Place, sampling: Sampling, flight: Flight) -> Turn:
        first, started = place.routes_from() if self._routed else 0, time.time()
        try:
            call = GenerationRequest(self.rollout_id, self.capture.graph.prompt(place), sampling, first, flight.take)
            asked = time.perf_counter()
            generation = await self._engine.generate(call)
            flight.engine_s = time.perf_counter() - asked
            _check(generation)
        except (Exception, asyncio.CancelledError) as error:
            if flight.landing.done():  # cancelled by us
                raise
            # The engine is another room's code: whatever it raises makes the trial Failed(engine) instead of hanging the harness.
            self.capture.engine_error = f"{type(error).__name__}: {error}"
            self.capture.lost_tokens += len(flight.tokens)
            log.exception("engine call of rollout %s failed", self.rollout_id)
            raise _lost() from error
        asked = min(self._sampling.max_tokens, request.max_tokens or self._sampling.max_tokens)
        if generation.stop_reason == "length" and sampling.max_tokens < asked:
            self.capture.over_length = True  # cut by what was left: some harnesses take such an answer for their end
        self._sampled += len(generation.token_ids)
        self._unanswered = 0
        self._counts.clear()
        parsed = self._rendering.parse(place.scaffold, generation.token_ids, request.tools)
        message = Message(
            "assistant",
            parsed.text,
            tuple(ToolCall(self._next_id(), call.name, call.arguments) for call in parsed.calls),
            reasoning=parsed.reasoning,
        )
        turn = self._answers[request.call] = self.capture.graph.add_turn(
            place, message, generation, request, malformed=parsed.malformed, spans=generation.spans or None
        )
        turn.started, turn.finished = started, time.time()
        self._routed = self._routed or generation.routes is not None
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
    if not math.isfinite(sum(generation.log_probs)):
        raise EngineError("a sampled token has a log-probability that is no finite number")


def _lost() -> Refusal:
    return Refusal(Reason.ENDED, "this rollout has failed: its model is no longer available")


def _closed(rollout_id: str) -> Refusal:
    return Refusal(Reason.NOT_FOUND, f"rollout {rollout_id} is closed")
