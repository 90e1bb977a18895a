"""What a sandbox writes on disk instead of in memory: the same limits, and nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from sandbox.environments.namespace.host import Host
from sandbox.environments.spec import SandboxSpec
from server.schemas.runspec import Limits
from tests.sandbox.support import needs_sandbox

LIMITS = Limits(memory_mb=64, disk_mb=128, scratch="disk")
needs_loops = pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="needs root and loop devices")


def loops(below: Path) -> list[str]:
    shown = subprocess.run(["/sbin/losetup", "-a"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if str(below) in line]


@needs_sandbox
@needs_loops
def test_a_disk_holds_more_than_memory_allows_and_no_more_than_its_size(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "a").write_text("1\n")
        async with Host.open(tmp_path / "state") as host:
            sandbox = await host.create(SandboxSpec(workspace=tmp_path / "tree", limits=LIMITS))
            written = await sandbox.exec("echo 2 > a; head -c 100000000 /dev/zero > big && ls -s big")
            assert written.return_code == 0, written  # more than its memory
            assert (await sandbox.exec("head -c 60000000 /dev/zero > more")).return_code != 0
            await sandbox.kill()
            usage = await sandbox.usage()
            assert usage.disk_full and usage.out_of_memory == 0
            await sandbox.destroy()

    asyncio.run(body())
    assert loops(tmp_path) == []


@needs_sandbox
@needs_loops
@pytest.mark.slow
def test_many_at_once_are_apart_and_a_killed_spawner_leaves_no_device(tmp_path: Path) -> None:
    async def body() -> None:
        host = await Host.start(tmp_path / "state")
        made = await asyncio.gather(*(host.create(SandboxSpec(limits=LIMITS)) for _ in range(12)))
        await asyncio.gather(*(sandbox.exec(f"echo {number} > /workspace/me") for number, sandbox in enumerate(made)))
        said = await asyncio.gather(*(sandbox.exec("cat /workspace/me") for sandbox in made))
        assert len(loops(tmp_path)) == 12
        assert [int(answer.stdout) for answer in said] == list(range(12))
        os.kill(host.pid, signal.SIGKILL)
        await host.ended()
        await host.stop()

    asyncio.run(body())
    for _ in range(600):
        if not loops(tmp_path):
            break
        asyncio.run(asyncio.sleep(0.1))
    assert loops(tmp_path) == []
    assert not list((tmp_path / "state").glob("*"))
