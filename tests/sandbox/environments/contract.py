"""The contract suite runs every test as root and as an ordinary user, in a real process of that user where pytest itself runs as root."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.preflight import Mode, problems
from sandbox.environments.namespace.sandbox import Sandbox
from sandbox.environments.spec import SandboxSpec
from sandbox.redteam.ordinary import as_ordinary_user
from server.schemas.runspec import Images, Limits
from server.schemas.runspec import Sandbox as Settings

LIMITS = Limits(memory_mb=128, processes=32, cpu_s=20, disk_mb=16, output_kb=64)


@dataclass
class Place:
    """What a test gets: a running host and a directory of its own."""

    host: Host
    root: Path

    def tree(self, **files: str) -> Path:
        """A pristine tree; `__` in a name stands for a directory separator, `_py` at its end for `.py`."""
        workspace = self.root / f"tree{len(list(self.root.glob('tree*')))}"
        workspace.mkdir()
        for name, text in files.items():
            path = workspace / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text)
        return workspace

    async def sandbox(self, spec: SandboxSpec | None = None) -> Sandbox:
        return await self.host.create(spec or SandboxSpec(limits=LIMITS))


Body = Callable[[Place], Awaitable[None]]


def contract(body: Body) -> Callable[[Mode], None]:
    """Turn a test body into two tests, `[rootful]` and `[rootless]`."""

    @pytest.mark.parametrize("mode", ["rootful", "rootless"])
    def test(mode: Mode) -> None:
        if mode == "rootful" and os.geteuid():
            pytest.skip("needs root")
        if reasons := problems(mode):
            pytest.skip("; ".join(reasons))
        if mode == "rootless" and os.geteuid() == 0:
            as_ordinary_user(lambda: _run(body, mode))
        else:
            _run(body, mode)

    test.__name__ = body.__name__
    test.__doc__ = body.__doc__
    return test


def _run(body: Body, mode: Mode) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="contract-") as directory:
            Path(directory).chmod(0o755)
            settings = Settings(images=Images(cache=Path(directory, "images")))
            async with Host.open(Path(directory, "state"), settings, mode=mode) as host:
                await body(Place(host, Path(directory)))

    asyncio.run(main())
