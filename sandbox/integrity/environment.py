"""A sandbox environment as trials use it: sealed when the agent is done, and handing over a diff in place of files.

Sealing kills everything in the agent's sandbox before anything is read from it. Harbor then "downloads" the artifact `workdir`, which is
the diff against the pristine tree, and "uploads" it to the verifier's sandbox, which is made from that tree: there it waits for the grader.
Nothing is run in a sandbox for any of this.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import override

from harbor.environments.base import ExecResult

from sandbox.environments.archive import Change
from sandbox.environments.errors import SandboxError, SandboxLost
from sandbox.environments.harbor_env import SandboxEnvironment
from sandbox.environments.spec import RoMount, SandboxSpec, UsageReport
from sandbox.tasks.lean import full_task

from . import hidden
from .changes import MAX_BYTES, Step, dump, load
from .gitview import HISTORY

_DONE = ExecResult(stdout="", stderr="", return_code=0)


class AgentBrokeTree(Exception):
    """What the agent left cannot be collected, by its own doing: too large, or unreadable."""


class TrialEnvironment(SandboxEnvironment):
    sealed = False
    usage: UsageReport | None = None
    changes: list[Change] | None = None
    """What the agent changed: collected when its sandbox is sealed, or put here before that by who regrades an archived diff."""
    archived: Path | None = None
    """The host's file that keeps them."""
    diff: list[Step] | None = None
    """In the verifier's environment: what the agent changed."""

    @property
    @override
    def _workspace(self) -> Path:
        """The pristine tree of the task that Harbor's lean twin stands for."""
        return full_task(self.environment_dir.parent) / "environment" / "workspace"

    async def seal(self) -> None:
        """Kill, count and collect. Raises AgentBrokeTree, or SandboxLost when the machinery is gone."""
        self.sealed = True
        try:
            await self.sandbox.kill()
            self.usage = await self.sandbox.usage()
        except SandboxError as error:  # a backend's own classes say nothing to Harbor, which knows errors by the name of their class
            raise SandboxLost(str(error)) from error
        if self.changes is not None:
            return
        try:
            self.changes = await self.sandbox.changes(MAX_BYTES)
        except SandboxLost as lost:
            raise SandboxLost(str(lost)) from lost
        except SandboxError as error:
            raise AgentBrokeTree(str(error)) from error

    @override
    def _spec(self) -> SandboxSpec:
        """The verifier's sandbox has the task's own repository back, and the test runner where there are hidden tests, both read-only."""
        spec = super()._spec()
        if not self.is_verifier:
            return spec
        task = full_task(self.environment_dir.parent)
        mounts = list(spec.mounts)
        if (task / HISTORY).is_dir():
            mounts.append(RoMount(task / HISTORY, f"{self.workdir}/.git"))
        if hidden.has_tests(task):
            mounts += [RoMount(path, f"{hidden.PYTEST_AT}/{name}") for name, path in hidden.packages().items()]
        return dataclasses.replace(spec, mounts=tuple(mounts))

    @property
    def fault(self) -> str:
        """What the agent did to its own sandbox, in words; empty when nothing."""
        usage = self.usage
        if usage is None:
            return ""
        facts = {
            f"{usage.out_of_memory} processes killed at the memory limit": usage.out_of_memory,
            "the disk was full": usage.disk_full,
            "the process limit was hit": usage.process_limit_hits,
            "the CPU limit was hit": usage.cpu_exceeded,
        }
        return "; ".join(words for words, true in facts.items() if true)

    @override
    async def start(self, force_build: bool) -> None:
        try:
            await super().start(force_build)
        except SandboxError:
            if not self.is_verifier:
                raise
            await super().start(force_build)  # grading is tried once more; the agent's set-up is retried as a whole by the runner

    # ------------------------------------------------------- Harbor's artifact transfer

    @override
    async def service_is_dir(self, path: str, *, service: str | None = None, user: str | int | None = None) -> bool:
        return False

    @override
    async def service_download_file(self, source_path: str, target_path: Path | str, *, service: str | None = None) -> None:
        target = Path(target_path)
        if source_path == self.workdir and self.changes is not None:
            await asyncio.to_thread(target.write_text, dump(self.changes))
            self.archived = target
        elif target.is_dir():  # noqa: ASYNC240
            target.rmdir()  # noqa: ASYNC240 -- Harbor made it empty; it would be packed, staged and sent on for nothing

    @override
    async def empty_dirs(self, dirs: Sequence[str | PurePosixPath], *, chmod: bool = True) -> ExecResult | None:
        return _DONE if self.is_verifier else await super().empty_dirs(dirs, chmod=chmod)

    @override
    async def ensure_dirs(self, dirs: Sequence[str | PurePosixPath], *, chmod: bool = True) -> ExecResult | None:
        return _DONE if self.is_verifier else await super().ensure_dirs(dirs, chmod=chmod)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        if self.is_verifier and target_path == self.workdir:
            self.diff = await asyncio.to_thread(load, Path(source_path))
        else:
            await super().upload_file(source_path, target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        # Harbor sends the agent's logs back after the run, and what it calls artifacts on to the verifier; the grader takes the diff alone.
        if not self.sealed and not self.is_verifier:
            await super().upload_dir(source_dir, target_dir)
