"""Names that are looked up in a sandbox are seen by the host, and lead nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.preflight import Mode, problems
from sandbox.environments.spec import ExecResult, SandboxSpec
from sandbox.harnesses.lookups import recorded
from tests.sandbox.support import needs_sandbox

pytestmark = needs_sandbox


@pytest.mark.parametrize("mode", ["rootful", "rootless"])
def test_look_ups_are_recorded_and_answered_with_no_such_name(tmp_path: Path, mode: Mode) -> None:
    if found := problems(mode):
        pytest.skip("; ".join(found))
    names: set[str] = set()

    async def look_up() -> tuple[ExecResult, ExecResult]:
        async with Host.open(tmp_path, mode=mode) as host:
            sandbox = await host.create(SandboxSpec())
            async with recorded(sandbox, names):
                other = await sandbox.exec("getent hosts Registry.example.org; echo $?")
                own = await sandbox.exec("getent hosts localhost")
            await sandbox.destroy()
            return other, own

    other, own = asyncio.run(look_up())
    assert other.stdout == b"2\n" and b"localhost" in own.stdout
    assert names == {"registry.example.org"}
