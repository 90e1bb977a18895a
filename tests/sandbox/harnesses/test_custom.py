"""The example of `docs/harnesses.md`: a harness of one's own, by import path, plays a whole trial."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.harnesses.hands import DONE, turn
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.store import Store
from sandbox.harnesses.verify import task
from server.schemas.outcome import Scored, Termination
from server.schemas.runspec import Harness
from server.schemas.scripted import Voice
from tests.sandbox.support import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_harness_solves_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    bug = task()
    voice = Voice(name="main", says=[bug.issue], turns=[turn("bash", command="ls"), turn("bash", command=bug.repair), DONE])
    harness = Harness(name="mine", version="1", adapter="loop_harness:Loop")

    async def one() -> Played:
        async with stage([harness], Store(tmp_path)) as room:
            played = await room.play("mine", [voice])
            assert len((played.logs / "agent" / "stream.jsonl").read_text().splitlines()) == 3
            return played

    played = asyncio.run(one())
    assert played.outcome == Scored(reward=1, termination=Termination.COMPLETED)
    assert (played.end.record.violations, played.end.record.harness, played.end.spoken) == ([], "mine", {"main": 3})


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (EXAMPLES.parent / "docs" / "harnesses.md").read_text(encoding="utf-8")
    assert (EXAMPLES / "loop_harness.py").read_text(encoding="utf-8").strip() in page
