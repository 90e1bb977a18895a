"""What a task can put in a harness's way: an instruction that fits on no command line, and modules of the names that the harness imports.
And what it must not find: the rollout's key on a command line."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.harnesses.hands import HANDS
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.verify import TITLE, repair_voice, task
from server.schemas.outcome import Scored, Termination
from server.schemas.tasks import TRAIN
from tests.sandbox.harnesses.support import pinned, store
from tests.sandbox.support import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow, pytest.mark.timeout(900)]  # the first one fetches the runtime

SHADOWS = ("litellm", "minisweagent", "openhands", "pydantic", "yaml", "httpx", "sitecustomize", "usercustomize")
LINES = "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | head -c 20000; echo looked"
CONTEXT = 1_200_000


@pytest.mark.parametrize(("name", "start"), [*((name, "exec") for name in HANDS), ("mini-swe-agent", "warm_fork")])
def test_it_works_whatever_the_task_holds_and_shows_no_key(name: str, start: str) -> None:
    """An argument of a process is at most 128 KiB long, and a datagram of a socket 208 KiB."""
    main = repair_voice(name, task())
    voice = main.model_copy(update={"turns": [HANDS[name].run(LINES), *main.turns]})

    async def one() -> Played:
        harness = pinned(name).model_copy(update={"start": start})
        async with stage([harness], store(name), CONTEXT, output_kb=4096) as room:
            place = room.room.tasks / TRAIN / room.room.index[TRAIN][0]
            told = place / "instruction.md"
            told.write_text(told.read_text() + "\n\n" + "The rest is a log.\n" * 16_000)
            for module in SHADOWS:
                (place / "environment" / "workspace" / f"{module}.py").write_text("raise SystemExit('shadowed')\n")
            return await room.play(name, [TITLE, voice], agent_s=250)

    played = asyncio.run(one())
    assert played.outcome == Scored(reward=1, termination=Termination.COMPLETED), (played.outcome, played.end.error)
    turns = played.end.record.turns
    assert max(len(text) for turn in turns for _, text in turn.context) > 250_000, "the whole instruction arrived"
    assert not played.key_in_argv
    seen = [text for turn in turns for _, text in turn.context if "looked" in text]
    assert seen and not any(played.key.get_secret_value() in text for text in seen)
