"""What a harness or its policy does to its own sandbox ends as the admission table says, and the next trial in the room starts clean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psutil
import pytest

from sandbox.harnesses.hands import HANDS
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


STARTS = {NAME: ("exec", "/claude"), "codex": ("exec", "/codex"), "mini-swe-agent": ("warm_fork", "mini_parent")}
"""How a harness is started, and what is on its command line: a program of its own, and a fork of a process that lives outside."""


def in_stage(body: Callable[[Stage], Awaitable[None]], name: str = NAME, **limits: int) -> None:
    async def main() -> None:
        harness = pinned(name).model_copy(update={"start": STARTS.get(name, ("exec", ""))[0]})
        async with stage([harness], store(name), **limits) as room:
            await body(room)
            again = await room.play(name, [repair_voice(name, task())], "next")
            assert again.outcome == Scored(reward=1, termination=Termination.COMPLETED)
            assert not left()

    asyncio.run(main())


def left() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if MARK in " ".join(process.info["cmdline"] or ())]


async def does(room: Stage, command: str, agent_s: float = 120, name: str = NAME) -> Played:
    """A trial in which the policy repairs the file, runs one command, and ends."""
    main = repair_voice(name, task())
    faulty = main.model_copy(update={"turns": [*main.turns[:3], HANDS[name].run(command), *HANDS[name].finish]})
    return await room.play(name, [faulty], "faulty", agent_s=agent_s)


@pytest.mark.parametrize("name", STARTS)
def test_a_harness_that_is_killed_is_graded_as_a_fault_of_the_agent(name: str) -> None:
    async def body(room: Stage) -> None:
        trial = asyncio.create_task(does(room, SLEEP, name=name))
        while not (sleeping := left()):
            assert not trial.done(), trial.result()
            await asyncio.sleep(0.1)
        next(process for process in sleeping[0].parents() if STARTS[name][1] in " ".join(process.cmdline())).kill()
        played = await trial
        assert isinstance(played.outcome, Scored)
        assert (played.outcome.reward, played.outcome.termination) == (1, Termination.AGENT_FAULT)
        assert "signal 9" in played.outcome.detail

    in_stage(body, name)


def test_an_agent_that_kills_all_it_can_is_graded_as_its_own_fault() -> None:
    async def body(room: Stage) -> None:
        played = await does(room, "kill -9 -1")
        assert isinstance(played.outcome, Scored) and played.outcome.termination is Termination.AGENT_FAULT

    in_stage(body)


@pytest.mark.parametrize("name", [NAME, "mini-swe-agent"])
def test_a_full_disk_is_the_agents_own_fault(name: str) -> None:
    async def body(room: Stage) -> None:
        played = await does(room, "for i in 1 2 3 4 5; do head -c 40M /dev/zero >/tmp/fill$i; done", name=name)
        assert isinstance(played.outcome, Scored) and played.outcome.termination is Termination.AGENT_FAULT
        assert "the disk was full" in played.outcome.detail

    in_stage(body, name, disk_mb=128)


@pytest.mark.parametrize("name", [NAME, "mini-swe-agent", "openhands"])
def test_a_fork_without_end_is_the_agents_own_fault(name: str) -> None:
    async def body(room: Stage) -> None:
        played = await does(room, f"f() {{ {SLEEP} & f & f; }}; f", agent_s=60, name=name)
        assert isinstance(played.outcome, Scored) and played.outcome.termination is Termination.AGENT_FAULT
        assert "the process limit was hit" in played.outcome.detail

    in_stage(body, name, processes=64)


@pytest.mark.parametrize("name", [NAME, "mini-swe-agent"])  # Codex itself stops waiting for a command after ten seconds
def test_ignoring_signals_does_not_outlive_the_deadline(name: str) -> None:
    async def body(room: Stage) -> None:
        played = await does(room, f"trap '' TERM INT HUP; setsid {SLEEP} & {SLEEP}", agent_s=12, name=name)
        assert isinstance(played.outcome, Failed) and played.outcome.cause is Cause.AGENT_TIMEOUT

    in_stage(body, name)
