"""A spawner or its owner that is killed takes every sandbox with it, and the next start sweeps what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.environments.errors import SandboxLost
from sandbox.environments.namespace import owner
from sandbox.environments.namespace.host import Host
from sandbox.redteam.ordinary import REPOSITORY
from tests.sandbox.environments.contract import NAMESPACES, Place, contract
from tests.sandbox.environments.test_contract import processes, until

OWNER = """
import asyncio, sys
from pathlib import Path
from sandbox.environments.namespace.host import Host
from sandbox.environments.spec import SandboxSpec
async def main():
    host = await Host.start(Path(sys.argv[1]))
    sandbox = await host.create(SandboxSpec())
    await sandbox.exec("n=21; setsid sleep 47$n.25 & sleep 47$n.25 &")
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@contract(on=NAMESPACES)
async def test_a_killed_spawner(place: Place) -> None:
    sandbox = await place.sandbox()
    target = await sandbox.fork_target()
    target.close()
    await sandbox.exec("setsid sleep 4722.25 & sleep 4722.25 &")
    os.kill(place.host.pid, signal.SIGKILL)
    await until(lambda: not processes("4722.25"))
    for call in (sandbox.exec("true"), sandbox.kill(), place.sandbox()):
        with pytest.raises(SandboxLost):
            await call
    await sandbox.destroy()
    async with Host.open(place.root / "state", mode=place.host.mode) as host:
        assert (await (await Place(host, place.root, place.where).sandbox()).exec("echo again")).stdout == b"again\n"
        assert [path.name for path in (place.root / "state").iterdir()] == [host._state.name]
    assert not any(Path(path).parent.exists() for path in target.cgroups)


@contract(on=NAMESPACES)
async def test_a_killed_owner(place: Place) -> None:
    state = place.root / "other"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(state)], cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            await until(lambda: len(processes("sleep 4721.25")) == 2)
        finally:
            process.kill()
    await until(lambda: not processes("sleep 4721.25") and not processes(str(state)))
    assert list(state.iterdir()) == []


@contract(on=NAMESPACES)
async def test_sweeping_spares_the_living_and_the_foreign(place: Place) -> None:
    state = place.root / "state"
    (state / "notes.txt").write_text("kept")
    (state / "lego-rl-foreign").mkdir()
    before = sorted(state.iterdir())
    assert owner.sweep(state) == []
    assert sorted(state.iterdir()) == before
    assert (await (await place.sandbox()).exec("echo alive")).stdout == b"alive\n"


def test_a_record_that_names_other_cgroups_is_not_followed(tmp_path: Path) -> None:
    state, record = owner.claim(tmp_path)
    victim = tmp_path / "victim"
    victim.mkdir()
    os.pwrite(record, json.dumps({"cgroups": {"tree": str(victim)}}).encode(), 0)
    os.close(record)
    assert owner.sweep(tmp_path) == [state.name]
    assert victim.is_dir()
