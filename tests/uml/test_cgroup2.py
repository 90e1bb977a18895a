"""What only a kernel with version 2 of cgroups alone can show; the sandboxes' own tests run there too, see `make test-cgroup2`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandbox.environments.backend import Sandbox
from sandbox.environments.namespace.host import Host
from sandbox.environments.spec import SandboxSpec, UsageReport
from server.schemas.runspec import Limits
from server.schemas.runspec import Sandbox as Settings
from tests.uml.inside import MARK

pytestmark = pytest.mark.skipif(MARK not in os.environ, reason="needs a kernel with cgroup version 2 alone: `make test-cgroup2`")
LIMITS = Limits(memory_mb=64, processes=16, cpu_s=120, disk_mb=16)
HOG = "data = []\nwhile True: data.append(bytearray(1 << 20))"


async def exceed(sandbox: Sandbox) -> UsageReport:
    """What a sandbox with LIMITS counts when its agent has asked for more memory and processes than it may have."""
    hungry = await sandbox.exec(["python3", "-c", HOG], timeout_s=300)
    crowd = await sandbox.exec("for i in $(seq 40); do sleep 60 & done; wait", timeout_s=5)
    assert hungry.return_code == -9
    assert crowd.timed_out or crowd.return_code
    usage = await sandbox.usage()
    assert usage.out_of_memory >= 1 and usage.process_limit_hits >= 1
    assert usage.cpu_s > 0
    return usage


def test_limits_are_those_of_version_2_alone(tmp_path: Path) -> None:
    assert [line.split()[2] for line in Path("/proc/mounts").read_text().splitlines() if "cgroup" in line] == ["cgroup2"]

    async def main() -> None:
        async with Host.open(tmp_path, Settings(), mode="rootful") as host:
            assert host.limits_mode == "cgroup"
            sandbox = await host.create(SandboxSpec(limits=LIMITS))
            peak = (await exceed(sandbox)).memory_peak
            assert LIMITS.memory_mb << 19 < peak <= LIMITS.memory_mb << 20
            await sandbox.destroy()

    asyncio.run(main())
