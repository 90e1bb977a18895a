"""The seam between trials and what runs their sandboxes: a backend is one package directory, named in `_BACKENDS`.

A `Backend` is started once per runner and makes a `Sandbox` per agent and per verifier. Its `start` proves that sandboxes hold here,
egress above all, and refuses otherwise; everything it makes can be told from what others made and is swept by the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from server.schemas.runspec import Sandbox as Settings

from .archive import Change
from .errors import ImageError
from .spec import ExecResult, LimitsMode, SandboxSpec, UsageReport, User

_BACKENDS = {
    "docker": "sandbox.environments.docker.host:DockerHost",
    "namespace": "sandbox.environments.namespace.host:Host",
    "kubernetes": "sandbox.environments.kubernetes.backend:Kubernetes",
}
"""By the name that `sandbox.environment` of a RunSpec uses. Imported when asked for: each may need a library that others do not."""


class Sandbox(Protocol):
    """A running sandbox. After `kill` only `usage`, `changes`, `download`, `kill` and `destroy` work.

    Raises SandboxError for what cannot be done, SandboxLost when the sandbox or what runs it is gone.
    """

    spec: SandboxSpec
    uid: int
    """Of `agent`, as processes in the sandbox see it."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: User = "agent",
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        max_output: int | None = None,
    ) -> ExecResult:
        """Run a command (a str by the shell) to its end; an end that nobody reported is an error, never an exit code.

        `env` is added to `spec.DEFAULT_ENV`; `max_output` bounds each stream, in bytes (default: from the spec). After `timeout_s`,
        or when the caller is cancelled, its process group gets SIGKILL. Processes that it leaves behind live on.
        """
        ...

    async def open_gate(self, host: str, port: int) -> str:
        """Let the sandbox reach one address, as the host sees it, at the URL that this returns; everything else stays unreachable."""
        ...

    async def close_gate(self) -> None:
        """End all egress, open connections too. Does nothing when no gate is open."""
        ...

    async def upload(self, source: Path, target: str, user: User = "agent") -> None:
        """Copy a host file to the path `target`, or a directory's content into the directory `target`; `user` owns the result."""
        ...

    async def download(self, source: str, target: Path, max_bytes: int = 64 << 20, user: User = "agent", cut: bool = False) -> list[str]:
        """Copy the file `source` to the host path `target`, or a directory's content into the directory `target`.

        Only regular files and directories arrive; the names of all else (links that an agent planted) are returned. What has more than
        `max_bytes`, or cannot be read to its end, is an error, or with `cut` arrives as far as it goes: its last file may lack its end.
        """
        ...

    async def kind(self, path: str) -> Literal["file", "directory", "other", "missing"]:
        """What is at a path in the sandbox; links are followed there."""
        ...

    async def changes(self, max_bytes: int = 64 << 20) -> list[Change]:
        """How the work directory differs from the pristine tree. Call `kill` first for an answer that stays true.

        Nothing of the sandbox runs for it and no link is followed. SandboxError when the changed files have more than `max_bytes`.
        """
        ...

    async def usage(self) -> UsageReport: ...

    async def kill(self) -> None:
        """SIGKILL to everything inside; on return no process of the sandbox exists and its gate is closed."""
        ...

    async def destroy(self) -> None:
        """`kill`, and remove every trace. Does nothing when that has been done."""
        ...


class Backend(ABC):
    """What makes sandboxes. Use `async with Backend.open(base, settings)`, or `start` and `stop`."""

    _running: ClassVar[weakref.WeakValueDictionary[Path, Backend]] = weakref.WeakValueDictionary()

    can_fork: ClassVar[bool] = False
    """Whether a process of this machine can be forked into a sandbox (`Harness.start: warm_fork`)."""
    label: str
    """What reports call it, such as `namespace/rootful`."""
    limits_mode: LimitsMode

    @classmethod
    @abstractmethod
    async def start(cls, base: Path, settings: Settings) -> Self:
        """Sweep what earlier owners of `base` left, prove that sandboxes hold, and be ready.

        `base` is the backend's own state directory on this machine. Raises SandboxError with what to do.
        """

    @classmethod
    @abstractmethod
    def problems(cls, settings: Settings) -> list[str]:
        """What stands in the way of sandboxes, as far as can be seen without making one, each with what to do."""

    @classmethod
    @abstractmethod
    def sweep(cls, base: Path) -> list[str]:
        """Remove what dead owners with state in `base` left behind, and say what it was. Blocks."""

    @classmethod
    def abandoned(cls, base: Path) -> list[str]:
        """What `sweep` would look at, as far as this machine can tell; only what `sandbox.doctor` cannot see by itself. Blocks."""
        return []

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox; it is ready when this returns. Raises SandboxError (ImageError for its image); nothing is left behind then."""

    @abstractmethod
    async def stop(self) -> None:
        """End every sandbox and remove all state."""

    async def fetch(self, images: Mapping[str, Path | None]) -> dict[str, str]:
        """Before a run: have its images at hand; a directory holds the Dockerfile that its image is built from. Returns why by image
        for those that cannot be had: a trial that needs one fails alone, with ImageError when its sandbox is made."""
        return {}

    async def copy_out(self, image: str, path: str, target: Path) -> None:
        """Copy a directory of an image to the new directory `target`: some tasks have their tree in their image. Raises ImageError."""
        raise ImageError(f"{self.label} cannot read an image: put the task's tree into environment/workspace")

    async def ended(self) -> str:
        """Return, with why, when all sandboxes are gone because the machinery that holds them is. Most have none that could go alone."""
        return await asyncio.get_running_loop().create_future()

    def exposed(self, path: Path) -> Path | None:
        """The directory of the host that every sandbox sees and that `path` lies in; None when agents cannot read `path`."""
        return None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, base: Path, settings: Settings | None = None, **options: Any) -> AsyncIterator[Self]:
        """`options` are those that `start` of this backend has beside."""
        backend = await cls.start(base, settings or Settings(), **options)
        try:
            yield backend
        finally:
            await backend.stop()

    @staticmethod
    def running(base: Path) -> Backend | None:
        """The one that this process started for `base`: Harbor makes environments from plain options and cannot pass one on."""
        return Backend._running.get(base.resolve())

    def _announce(self, base: Path) -> None:
        """For `start`: from now on `running` finds this backend."""
        self._running[base.resolve()] = self

    def _withdraw(self, base: Path) -> None:
        """For `stop`. Another one may have been started for the same directory meanwhile."""
        if self._running.get(base.resolve()) is self:
            del self._running[base.resolve()]


def backend_of(settings: Settings) -> type[Backend]:
    module, _, name = _BACKENDS[settings.environment].partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), name)
    return found


def backends() -> dict[str, type[Backend]]:
    """All of them, for who sweeps or reports."""
    return {name: backend_of(Settings.model_construct(environment=name)) for name in _BACKENDS}
