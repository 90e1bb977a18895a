"""What a harness or its policy does to its own sandbox ends as the admission table says, and the next trial in the room starts clean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psutil
import pytest

from sandbox.harnesses.hands import DONE, HANDS
from sandbox.harnesses.stage import Played, Stage, stage
from sandbox.harnesses.verify import repair_voice, task
from server.schemas.outcome import Cause, Failed, Scored, Termination
from tests.sandbox.harnesses.support import pinned, store
from tests.sandbox.support import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime

NAME = "claude-code"
MARK = "4718.25"
"""Seconds that nobody else sleeps."""
SLEEP = f"python3 -c 'import time; time.sleep({MARK})'"
"""Claude Code refuses to run `sleep` by itself."""


def in_stage(body: Callable[[Stage], Awaitable[None]], **limits: int) -> None:
    async def main() -> None:
        async with stage([pinned(NAME)], store(NAME), **limits) as room:
            await body(room)
            again = await room.play(NAME, [repair_voice(NAME, task())], "next")
            assert again.outcome == Scored(reward=1, termination=Termination.COMPLETED)
            assert not left()

    asyncio.run(main())


def left() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if MARK in " ".join(process.info["cmdline"] or ())]


async def does(room: Stage, command: str, agent_s: float = 120) -> Played:
    """A trial in which the policy repairs the file, runs one command, and ends."""
    main = repair_voice(NAME, task())
    faulty = main.model_copy(update={"turns": [*main.turns[:3], HANDS[NAME].run(command), DONE]})
    return await room.play(NAME, [faulty], "faulty", agent_s=agent_s)


def test_a_harness_that_is_killed_is_graded_as_a_fault_of_the_agent() -> None:
    async def body(room: Stage) -> None:
        trial = asyncio.create_task(does(room, SLEEP))
        while not (sleeping := left()):
            assert not trial.done(), trial.result()
            await asyncio.sleep(0.1)
        (harness,) = [p for p in sleeping[0].parents() if p.cmdline()[:1] and p.cmdline()[0].endswith("/claude")]
        harness.kill()
        played = await trial
        assert isinstance(played.outcome, Scored)
        assert (played.outcome.reward, played.outcome.termination) == (1, Termination.AGENT_FAULT)
        assert "signal 9" in played.outcome.detail

    in_stage(body)


def test_an_agent_that_kills_all_it_can_is_graded_as_its_own_fault() -> None:
    async def body(room: Stage) -> None:
        played = await does(room, "kill -9 -1")
        assert isinstance(played.outcome, Scored) and played.outcome.termination is Termination.AGENT_FAULT

    in_stage(body)


def test_a_full_disk_is_the_agents_own_fault() -> None:
    async def body(room: Stage) -> None:
        played = await does(room, "for i in 1 2 3 4 5; do head -c 40M /dev/zero >/tmp/fill$i; done")
        assert isinstance(played.outcome, Scored) and played.outcome.termination is Termination.AGENT_FAULT
        assert "the disk was full" in played.outcome.detail

    in_stage(body, disk_mb=128)


def test_a_fork_without_end_is_the_agents_own_fault() -> None:
    async def body(room: Stage) -> None:
        played = await does(room, f"f() {{ {SLEEP} & f & f; }}; f", agent_s=60)
        assert isinstance(played.outcome, Scored) and played.outcome.termination is Termination.AGENT_FAULT
        assert "the process limit was hit" in played.outcome.detail

    in_stage(body, processes=64)


def test_ignoring_signals_does_not_outlive_the_deadline() -> None:
    async def body(room: Stage) -> None:
        played = await does(room, f"trap '' TERM INT HUP; setsid {SLEEP} & {SLEEP}", agent_s=12)
        assert isinstance(played.outcome, Failed) and played.outcome.cause is Cause.AGENT_TIMEOUT

    in_stage(body)
