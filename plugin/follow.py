"""Watching a run from a terminal: one line per finished step and evaluation, and the forming step while one waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.schemas.api import RunStatus
from server.schemas.states import TERMINAL_RUN_STATES, RunState

from . import show
from .client import Client
from .errors import NoAnswer, ServerAbsent

POLL_S = 1.0
AWAY_S = 120.0
"""A server that restarts does not end the run, so following waits this long for it to come back."""

Say = Callable[[str], None]


def follow(connect: Callable[[], Client], run_id: str, say: Say, say_now: Say) -> RunStatus:
    """Report until the run has ended; returns its last status.

    `say` gets lines that stay, `say_now` the state of the moment (shown only where it can be overwritten).
    """
    view = _View(say)
    away_since: float | None = None
    client = connect()
    while True:
        try:
            status = client.run(run_id)
            away_since = None
        except NoAnswer:
            if away_since is None:
                away_since = time.monotonic()
                say("the server is away; the run goes on without it, waiting for it to come back")
            elif time.monotonic() - away_since > AWAY_S:
                raise
            time.sleep(POLL_S)
            client = _again(connect, client)
            continue
        view.update(status)
        if status.state in TERMINAL_RUN_STATES:
            client.close()
            return status
        say_now(show.forming(status.forming) if status.forming else status.summary)
        time.sleep(POLL_S)


def _again(connect: Callable[[], Client], client: Client) -> Client:
    """A restarted server may listen elsewhere."""
    try:
        fresh = connect()
    except ServerAbsent:
        return client
    client.close()
    return fresh


class _View:
    """What of a run has been reported."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._state: RunState | None = None
        self._steps = 0
        self._evaluations = 0

    def update(self, status: RunStatus) -> None:
        if status.state is not self._state:
            self._state = status.state
            self._say(f"{status.run_id} is {status.state}" + (f": {status.reason}" if status.reason else ""))
        # Points of a step that is still forming move; the finished ones come first.
        for point in status.train_reward[self._steps : status.steps_done]:
            curve = show.sparkline([p.value for p in status.train_reward if p.step <= point.step])
            failed = f", {status.failed} failed" if status.failed else ""
            self._say(
                f"step {point.step:>3}/{status.steps_expected}  train reward {point.value:.2f} {curve}  "
                f"{status.trials} trials{failed}{_eta(status)}"
            )
        for point in status.held_out[self._evaluations :]:
            self._say(f"held-out after step {point.step}: {show.held_out(point)}")
        self._steps, self._evaluations = status.steps_done, len(status.held_out)


def _eta(status: RunStatus) -> str:
    left = status.steps_expected - status.steps_done
    if not status.started or not status.steps_done or left <= 0:
        return ""
    return f"  about {(time.time() - status.started) / status.steps_done * left:.0f} s to go"
