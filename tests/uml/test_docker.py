"""A Docker engine on version 2 of cgroups alone, whose storage bounds disks by itself: overlay2 on xfs with project quotas."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.environments.spec import SandboxSpec
from tests.sandbox.environments import docker_engine
from tests.uml.inside import MARK
from tests.uml.test_cgroup2 import LIMITS, exceed

pytestmark = [
    pytest.mark.skipif(MARK not in os.environ, reason="needs a kernel with project quotas: `make test-cgroup2`"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@contextlib.contextmanager
def quotas(data: Path) -> Iterator[None]:
    """An xfs with project quotas at `data`."""
    tools = Path(os.environ[MARK])
    env = os.environ | {"LD_LIBRARY_PATH": str(tools / "usr/lib/x86_64-linux-gnu")}
    file = data.with_name("data.xfs")
    with file.open("wb") as made:
        made.truncate(1 << 30)
    subprocess.run([tools / "sbin/mkfs.xfs", "-q", file], env=env, check=True)
    subprocess.run(["mount", "-o", "loop,prjquota", file, data], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", data], check=True)


@pytest.fixture(scope="module")
def room() -> Iterator[docker_engine.DockerRoom]:
    if reason := docker_engine.missing():
        pytest.skip(reason)
    network = "--bridge none --iptables=false --ip-forward=false --ip-masq=false"
    with docker_engine.engine(network=network, storage=quotas) as engine, docker_engine.docker_room(engine) as found:
        yield found


def test_a_disk_is_bounded_by_the_storage_itself(room: docker_engine.DockerRoom) -> None:
    async def fill() -> None:
        sandbox = await room.host.create(SandboxSpec(image=room.settings.image, limits=LIMITS))
        result = await sandbox.exec("head -c 30000000 /dev/zero > /workspace/fill; stat -c %s /workspace/fill", timeout_s=300)
        assert b"No space left on device" in result.stderr or b"quota" in result.stderr
        assert int(result.stdout) <= LIMITS.disk_mb << 20
        assert (await sandbox.exec("rm fill; echo on")).stdout == b"on\n"
        await sandbox.exec("head -c 30000000 /dev/zero > /workspace/fill", timeout_s=300)
        await sandbox.kill()
        assert (await sandbox.usage()).disk_full
        await sandbox.destroy()

    room.runner.run(fill())


def test_limits_are_those_of_version_2(room: docker_engine.DockerRoom) -> None:
    async def run() -> None:
        sandbox = await room.host.create(SandboxSpec(image=room.settings.image, limits=LIMITS))
        await exceed(sandbox)
        await sandbox.destroy()

    room.runner.run(run())
