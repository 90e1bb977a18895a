"""A task image has its own programs, and a harness brings all that it needs: here one without Python, tmux, and their libraries."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.environments.images.cache import IN_PLACE
from sandbox.environments.namespace.preflight import problems
from sandbox.harnesses.hands import HANDS
from sandbox.harnesses.pins import PINS
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.verify import repair_voice, task
from server.schemas.outcome import Scored, Termination
from tests.sandbox.environments.images import directory, programs, tar
from tests.sandbox.harnesses.support import pinned, store

pytestmark = [
    pytest.mark.skipif(bool(found := problems("rootful")), reason="; ".join(found)),
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first one fetches the runtime
]
MAPPED = "/logs/agent/mapped"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("image")
    with tarfile.open(fileobj=io.BytesIO(tar([directory("etc"), *programs()]))) as archive:
        archive.extractall(root, filter="tar")
    assert not [path for path in root.rglob("*") if "python" in path.name or "tmux" in path.name]
    yield f"{IN_PLACE}{root}"


@pytest.mark.parametrize(
    ("name", "start"), [("mini-swe-agent", "exec"), ("mini-swe-agent", "warm_fork"), ("openhands", "exec"), ("terminus-2", "exec")]
)
def test_a_harness_needs_nothing_of_the_image(name: str, start: str, image: str) -> None:
    """The policy repairs the file and notes what the process above its shell has mapped: the harness, or the tmux that it works in.

    A forked harness hides its memory.
    """
    bug, hands = task(), HANDS[name]
    look = hands.run(f"sed -n 's/^[^/]*\\//\\//p' /proc/$PPID/maps >{MAPPED}")
    write = hands.run(f"cat >/workspace/{bug.file} <<'END'\n{bug.fixed}\nEND")
    voice = repair_voice(name, bug).model_copy(update={"turns": [hands.run("ls"), look, write, *hands.finish]})

    async def one() -> tuple[Played, list[str]]:
        harness = pinned(name).model_copy(update={"start": start})
        async with stage([harness], store(name), sandbox={"image": image}) as room:
            run = await room.play(name, [voice])
            return run, (run.logs / "agent" / "mapped").read_text().splitlines()

    run, mapped = asyncio.run(one())
    assert run.outcome == Scored(reward=1, termination=Termination.COMPLETED), (run.outcome, run.end.error)
    assert (run.end.record.violations, run.foreign_hosts) == ([], set())
    tree = store(name).tree(PINS[name])
    assert bool(mapped) is (start == "exec")
    assert {path for path in mapped if not Path(path).is_relative_to(tree)} == set()
