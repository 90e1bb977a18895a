"""From a request to its answer on the wire: whole, or as events while the policy samples."""

from __future__ import annotations

import time

import msgspec

from trainer.capture.request import Request
from trainer.proxy.dialects import Dialect
from trainer.proxy.flight import Flight
from trainer.proxy.limits import Patience
from trainer.proxy.line import EVENTS, Line
from trainer.proxy.refusal import Refusal
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.proxy.streaming import TurnStream


async def answer(line: Line, dialect: Dialect, session: Session, request: Request, rendering: Rendering, patience: Patience) -> float:
    """The engine's seconds. Raises Refusal, and ClientGone, after which the turn counts as never sent."""
    flight, answer_id = session.board(request), session.next_answer_id()
    try:
        if request.stream:
            stream = TurnStream(rendering, flight.scaffold, dialect.writer(request, flight.prompt_tokens, answer_id))
            await _stream(line, dialect, flight, stream, patience.keep_alive)
        else:
            await line.wait(flight.landing)
            await line.answer(200, msgspec.json.encode(dialect.encode(flight.landing.result(), request, answer_id)))
        flight.landing.result().sent = True
        return flight.engine_s
    finally:
        session.leave(flight)


async def _stream(line: Line, dialect: Dialect, flight: Flight, stream: TurnStream, keep_alive: float) -> None:
    """Nothing is written before there is something to show, or `keep_alive` seconds have passed: until then a failure still has a status.

    After that, a failure ends an answer that showed nothing with an error event. One that showed text just ends: an error behind text
    makes harnesses end the run or keep half a turn.
    """
    seen, shown, written = 0, False, time.monotonic()
    while not flight.landing.done():
        await line.wait(flight.news(seen), max(0.0, written + keep_alive - time.monotonic()))
        if flight.landing.done():
            break
        new = flight.tokens[seen:]
        seen += len(new)
        text = stream.feed(new) if new else ""
        shown = shown or bool(text)
        if not text and time.monotonic() >= written + keep_alive:
            text = stream.keep_alive()
        if text:
            if not line.started:
                await line.begin()
                text = stream.start() + text
            await line.events(text, more=True)
            written = time.monotonic()
    try:
        turn = flight.landing.result()
    except Refusal as refusal:
        if line.started:
            await line.events("" if shown else stream.break_off(dialect.refuse(refusal)[1]), more=False)
        raise
    if line.started:
        await line.events(stream.finish(turn), more=False)
    else:
        await line.answer(200, stream.start() + stream.finish(turn), EVENTS)
