"""What to do with each recorded exchange: send it, or skip it because the proxy would have kept it from happening.

The recording server broke answers on purpose. A proxy hides such faults, so of a request and its repetitions only the first is sent: its
engine call fails as often as the recording failed, then gives the turn that the harness went on with. The repetitions would not have
happened and are skipped, as is a request that was refused for good. A harness that hung up by itself does so again, and its next try is
sent like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.replay.recording import Block, Exchange, is_turn, mention


@dataclass(eq=False, repr=False)  # steps refer to steps
class Step:
    """One exchange to send. `after` are steps whose answers must be there first; `meanwhile` are begun while this one is under way."""

    exchange: Exchange
    blocks: tuple[Block, ...] = ()
    by_length: bool = False
    faults: int = 0
    faults_late: bool = False
    """The first fault comes when content has gone out."""
    t_end: float = 0.0
    after: list[Step] = field(default_factory=list)
    meanwhile: list[Step] = field(default_factory=list)

    @property
    def hangs_up(self) -> bool:
        return self.exchange.hung_up


def plan(exchanges: Sequence[Exchange]) -> list[Step]:
    """Steps in the order of sending; what is missing was skipped."""
    steps, done = list[Step](), set[int]()
    for n, exchange in enumerate(exchanges):
        if exchange.i in done:
            continue
        if not exchange.model_call:
            if exchange.method in ("HEAD", "GET") or exchange.path.endswith("/count_tokens"):
                steps.append(Step(exchange, t_end=exchange.t_end))
            continue
        step = Step(exchange, exchange.blocks, exchange.by_length, t_end=exchange.t_end)
        if not exchange.answered and not exchange.hung_up:
            again = _again(exchange, exchanges[n + 1 :])
            done.update(other.i for other in again)
            if not _hide(step, again, exchanges[n + 1 :]):
                continue
        elif exchange.hung_up:
            again = _again(exchange, exchanges[n + 1 :])
            step.blocks = again[-1].blocks if again and again[-1].answered else exchange.blocks
        steps.append(step)
    _order(steps)
    return steps


def _again(exchange: Exchange, later: Sequence[Exchange]) -> list[Exchange]:
    """The repetitions of a failed request, up to the first that was answered."""
    found = []
    for other in later:
        if other.model_call and other.conversation == exchange.conversation:
            found.append(other)
            if other.answered:
                break
    return found


def _hide(step: Step, again: Sequence[Exchange], later: Sequence[Exchange]) -> bool:
    """Give the step the turn that the harness went on with, behind faults. False when there is none."""
    exchange = step.exchange
    step.faults, step.faults_late = 1 + len([other for other in again if not other.answered]), exchange.begun
    if again and again[-1].answered:
        step.blocks, step.by_length, step.t_end = again[-1].blocks, again[-1].by_length, again[-1].t_end
        return True
    kept = next((other for other in later if other.model_call and _goes_on(other, exchange)), None)
    if kept is None:
        return False
    quoted = json.dumps(kept.messages)  # the harness kept what had arrived whole
    step.blocks = tuple(block for block in exchange.blocks if block.kind != "call" or re.search(mention(block.id), quoted))
    return True


def _goes_on(other: Exchange, exchange: Exchange) -> bool:
    """The broken answer is in the history of `other`."""
    known = len(exchange.history)
    if len(other.history) <= known or other.history[:known] != exchange.history:
        return False
    return is_turn(other.messages[known])


def _order(steps: Sequence[Step]) -> None:
    """A step waits for every answer that had arrived when it was recorded, and for the one that holds an id it quotes."""
    bodies = [json.dumps(step.exchange.body) for step in steps]
    needs: list[set[int]] = []
    for n, step in enumerate(steps):
        direct = {m for m in range(n) if steps[m].t_end <= step.exchange.t or _quotes(bodies[n], steps[m])}
        needs.append(direct.union(*(needs[m] for m in direct)))
        step.after = [steps[m] for m in sorted(direct)]
    for n, step in enumerate(steps):
        overlaps = (m for m in range(n + 1, len(steps)) if steps[m].exchange.t < step.t_end)
        step.meanwhile = [steps[m] for m in overlaps if n not in needs[m]]


def _quotes(body: str, step: Step) -> bool:
    return any(block.id and re.search(mention(block.id), body) for block in step.blocks)
