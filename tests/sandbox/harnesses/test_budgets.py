"""A turn cap is said to each harness in words that it takes as its own end: it stops, and what it did is graded."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.harnesses.hands import HANDS
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.verify import TITLE, repair_voice, task
from server.schemas.outcome import Scored
from tests.sandbox.harnesses.support import pinned, store
from tests.sandbox.support import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime


@pytest.mark.parametrize("name", HANDS)
def test_a_harness_ends_at_its_turn_cap_and_is_graded(name: str) -> None:
    """The cap is behind the edit, so the work is done although nobody said so."""
    title = name == "opencode"

    async def one() -> Played:
        async with stage([pinned(name)], store(name)) as room:
            return await room.play(name, [TITLE, repair_voice(name, task())], max_turns=3 + title, agent_s=150)

    run = asyncio.run(one())
    assert isinstance(run.outcome, Scored), (run.outcome, run.end.error)
    assert (run.outcome.reward, run.end.turn_cap_hit, len(run.end.record.turns)) == (1, True, 3 + title)
