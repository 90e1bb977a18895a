"""How many tokens a call may sample, or why it may not be made."""

from __future__ import annotations

from trainer.capture.graph import Place
from trainer.proxy.limits import Limits
from trainer.proxy.refusal import Reason, Refusal


def check_rollout(limits: Limits, turns: int, sampled: int) -> None:
    """Whether a rollout may make one more call after `turns` answers of `sampled` tokens. Raises Refusal(TURN_CAP) or (OVERFLOW)."""
    if turns >= limits.max_turns:
        raise _used_up(Reason.TURN_CAP, f"the {limits.max_turns} turns of this rollout are used up", limits)
    if limits.budget is not None and sampled >= limits.budget:
        raise _used_up(Reason.OVERFLOW, f"the {limits.budget} tokens of this rollout are used up", limits)


def allowance(limits: Limits, place: Place, sampled: int, *, opens: bool) -> int:
    """Tokens left for an answer at `place`, at least 1. Raises Refusal(TURN_CAP) or Refusal(OVERFLOW).

    `opens`: the call is the one that opens the rollout. Only its prompt counts against the prompt budget: a summary, and what goes on
    behind one, reads as long a history as the context holds.
    Calls under way at the same time each get what is left, so `limits.budget` may be overdrawn by what runs in parallel.
    """
    if limits.idle_turns is not None and _idle(place) >= limits.idle_turns:
        raise _used_up(Reason.TURN_CAP, f"the last {limits.idle_turns} turns called no tool", limits)
    longest = _longest(limits, place, opens)
    if place.end >= longest:
        raise Refusal(Reason.OVERFLOW, "the prompt leaves no room for an answer", tokens=place.end, limit=longest)
    room = longest - place.end
    return room if limits.budget is None else min(room, limits.budget - sampled)


def _longest(limits: Limits, place: Place, opens: bool) -> int:
    """Longest sequence that may grow here. The first prompt of the conversation decides where the response budget begins."""
    if opens and limits.prompt is not None and place.end > limits.prompt:
        return limits.prompt
    if limits.response is None:
        return limits.context
    first = next(iter(place.node.turns()), None)
    return min(limits.context, (first.prompt_tokens if first is not None else place.end) + limits.response)


def _idle(place: Place) -> int:
    """Turns without a tool call at the end of the conversation."""
    count = 0
    for turn in reversed(place.node.turns()):
        if turn.message.tool_calls:
            break
        count += 1
    return count


def _used_up(reason: Reason, message: str, limits: Limits) -> Refusal:
    """Said with the numbers of a prompt that is too long, whatever its length."""
    return Refusal(reason, message, tokens=limits.context + 1, limit=limits.context)
