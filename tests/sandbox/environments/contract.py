"""The contract suite runs every test in every environment: namespaces as root and as an ordinary user (in a real process of that user where
pytest itself runs as root), containers of a real Docker engine, pods of a fake API server, and those of a real cluster where
`make test-cluster` gives one. `Place` is what a test gets; where they differ, it says how."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.preflight import problems
from sandbox.environments.spec import SandboxSpec
from sandbox.redteam.ordinary import as_ordinary_user
from server.schemas.runspec import Images, Limits
from server.schemas.runspec import Sandbox as Settings
from tests.sandbox.environments.docker_engine import DockerRoom
from tests.sandbox.environments.kubernetes_room import KubernetesRoom

LIMITS = Limits(memory_mb=128, processes=32, cpu_s=20, disk_mb=16, output_kb=64)


@dataclass
class Place:
    """What a test gets: a running host and a directory of its own."""

    host: Any
    root: Path
    where: str
    image: str | None = None
    made: list[Any] = dataclasses.field(default_factory=list)

    def tree(self, **files: str) -> Path:
        """A pristine tree; `__` in a name stands for a directory separator, `_py` at its end for `.py`."""
        workspace = self.root / f"tree{len(list(self.root.glob('tree*')))}"
        workspace.mkdir()
        for name, text in files.items():
            path = workspace / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text)
        return workspace

    async def sandbox(self, spec: SandboxSpec | None = None) -> Any:
        spec = spec or SandboxSpec(limits=LIMITS)
        self.made.append(await self.host.create(dataclasses.replace(spec, image=spec.image or self.image)))
        return self.made[-1]

    @property
    def namespaces(self) -> bool:
        return self.where in ("rootful", "rootless")

    @property
    def pods(self) -> bool:
        return self.where in ("kubernetes", "cluster")


Body = Callable[[Place], Awaitable[None]]
NAMESPACES = ("rootful", "rootless")


def contract(body: Body | None = None, *, on: tuple[str, ...] = ()) -> Any:
    """Turn a test body into one test per environment, such as `[rootful]`; `on` names those that it is about, where not all."""
    if body is None:
        return functools.partial(contract, on=on)

    @pytest.mark.parametrize("where", [pytest.param(name, marks=_MARKS.get(name, ())) for name in on or _RUNNERS])
    def test(where: str, request: pytest.FixtureRequest) -> None:
        _RUNNERS[where](body, where, request)

    test.__name__ = body.__name__
    test.__doc__ = body.__doc__
    return test


def _in_namespaces(body: Body, mode: Any, request: pytest.FixtureRequest) -> None:
    if mode == "rootful" and os.geteuid():
        pytest.skip("needs root")
    if reasons := problems(mode):
        pytest.skip("; ".join(reasons))

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="contract-") as directory:
            Path(directory).chmod(0o755)
            settings = Settings(images=Images(cache=Path(directory, "images")))
            async with Host.open(Path(directory, "state"), settings, mode=mode) as host:
                await body(Place(host, Path(directory), mode))

    if mode == "rootless" and os.geteuid() == 0:
        as_ordinary_user(lambda: asyncio.run(main()))
    else:
        asyncio.run(main())


def _in_docker(body: Body, where: str, request: pytest.FixtureRequest) -> None:
    """All tests share one host and its loop, as all trials of a runner do."""
    shared: DockerRoom = request.getfixturevalue("docker_room")
    with tempfile.TemporaryDirectory(prefix="contract-") as directory:
        shared.runner.run(body(Place(shared.host, Path(directory), where, shared.settings.image)))


def _in_kubernetes(body: Body, where: str, request: pytest.FixtureRequest) -> None:
    shared: KubernetesRoom = request.getfixturevalue(f"{where}_room")
    with tempfile.TemporaryDirectory(prefix="contract-") as directory:
        Path(directory).chmod(0o755)
        place = Place(shared.host, Path(directory), where, shared.settings.image)

        async def main() -> None:
            try:
                await body(place)
            finally:  # a node has room for a few dozen pods
                await asyncio.gather(*(sandbox.destroy() for sandbox in place.made))

        shared.runner.run(main())


_RUNNERS: dict[str, Callable[[Body, Any, pytest.FixtureRequest], None]] = {
    **dict.fromkeys(NAMESPACES, _in_namespaces),
    "docker": _in_docker,
    "kubernetes": _in_kubernetes,
    "cluster": _in_kubernetes,
}
_MARKS = {"docker": pytest.mark.slow, "kubernetes": pytest.mark.slow, "cluster": pytest.mark.slow}
