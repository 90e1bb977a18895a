"""Whole trials of a real harness with a scripted policy: a runner's room, the real proxy, and a look at the agent's sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import SecretStr

from sandbox.environments.backend import Backend, Sandbox
from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.sandbox import Sandbox as NamespaceSandbox
from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import decide
from sandbox.runner.service import open_room
from server.schemas.outcome import Failed, Scored
from server.schemas.outcome import Stage as Step
from server.schemas.runspec import Harness, RunSpec
from server.schemas.scripted import ScriptedEnd, ScriptedLimits, ScriptedOrder, Voice
from server.schemas.tasks import TRAIN
from server.schemas.trials import TrialRequest

from .lookups import recorded
from .scripted import scripted_proxy
from .store import Store

CONTEXT = 400_000
"""Tokens, which are bytes here: about 100,000 of a real vocabulary."""
MAX_OUTPUT = 20_000


@dataclass(frozen=True)
class Played:
    """What a trial came to. `stages` are seconds; `logs` is the directory of the trial while the stage is open, `key` the rollout's, and
    `key_in_argv` whether it was seen on the command line of a process."""

    outcome: Scored | Failed
    end: ScriptedEnd
    exit_code: int | None
    foreign_hosts: set[str]
    stages: dict[Step, float]
    cpu_s: float
    rss_mb: float
    logs: Path
    key: SecretStr
    key_in_argv: bool


@dataclass(frozen=True)
class Stage:
    room: Room
    host: Backend

    async def play(
        self, harness: str, voices: Sequence[Voice], trial_id: str = "trial", limits: ScriptedLimits | None = None, **budgets: float
    ) -> Played:
        """One trial of the room's only task. `budgets` are seconds by stage. Raises VerifyError when the learning side is missing."""
        context = self.room.spec.model.context
        order = ScriptedOrder(
            rollout_id=trial_id,
            key=SecretStr(secrets.token_urlsafe(32)),
            harness=harness,
            context=context,
            max_tokens=MAX_OUTPUT,
            limits=limits or ScriptedLimits(),
            voices=list(voices),
        )
        # Only a sandbox that lives on this machine can be looked into from it.
        key = order.key.get_secret_value().encode()
        watch, clock = Watch(psutil.Process(self.host.pid) if isinstance(self.host, Host) else None, key), _Clock()
        self.room.launchers[harness].watch = watch if watch.host else None
        async with scripted_proxy(order) as proxy:
            document: dict[str, Any] = {"trial_id": trial_id, "task": self.room.index[TRAIN][0], "harness": harness, "budgets": budgets}
            attempt = Attempt(self.room, TrialRequest.model_validate(document | {"proxy": proxy.endpoint}), trial_id, clock)
            facts = await attempt.run()
            return Played(
                outcome=decide(facts),
                end=await proxy.close(),
                exit_code=attempt.exit_code,
                foreign_hosts=watch.names,
                stages=clock.lengths(),
                cpu_s=attempt.cpu_s,
                rss_mb=watch.peak / 2**20,
                logs=self.room.trials / trial_id,
                key=order.key,
                key_in_argv=watch.exposed,
            )


@contextlib.asynccontextmanager
async def stage(
    harnesses: Sequence[Harness], store: Store, context: int = CONTEXT, sandbox: Mapping[str, Any] | None = None, **limits: int
) -> AsyncIterator[Stage]:
    """A room with one task and these harnesses. `sandbox` is more of that section, `limits` are a sandbox's. Raises NotReady."""
    spec = RunSpec.model_validate(
        {
            "model": {"path": "builtin:none", "context": context},
            "harnesses": [harness.model_dump() for harness in harnesses],
            "data": {"family": "onebug", "train_tasks": 1, "held_out_tasks": 1},
            "sandbox": {**(sandbox or {}), "limits": {"memory_mb": 2048, "processes": 256, "cpu_s": 120, "disk_mb": 512} | limits},
            "rollout": {"max_new_tokens": MAX_OUTPUT},
        }
    )
    with tempfile.TemporaryDirectory(prefix="lego-stage-") as scratch:
        root = Path(scratch)
        (root / "trials").mkdir()
        async with open_room(spec, store, root / "tasks", root / "trials", root / "sandboxes") as (room, host):
            yield Stage(room, host)


@dataclass
class Watch:
    """What the host sees while the harness runs: names that are looked up, the peak of the largest process, in bytes, and whether `key`
    is on a command line."""

    host: psutil.Process | None
    key: bytes
    names: set[str] = field(default_factory=set)
    peak: int = 0
    exposed: bool = False

    @contextlib.asynccontextmanager
    async def __call__(self, sandbox: Sandbox) -> AsyncIterator[None]:
        assert isinstance(sandbox, NamespaceSandbox)  # noqa: S101 -- the stage's spec names it
        async with recorded(sandbox, self.names):
            looking = asyncio.create_task(self._look())
            try:
                yield
            finally:
                looking.cancel()

    async def _look(self) -> None:
        while True:
            for process in self.host.children(recursive=True) if self.host else ():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    status = Path(f"/proc/{process.pid}/status").read_text()  # noqa: ASYNC240 -- no disk behind it
                    self.peak = max(self.peak, int(status.partition("VmHWM:")[2].split()[0]) << 10)
                    self.exposed |= self.key in Path(f"/proc/{process.pid}/cmdline").read_bytes()  # noqa: ASYNC240 -- as above
            await asyncio.sleep(0.1)


@dataclass
class _Clock:
    entered: list[tuple[Step, float]] = field(default_factory=list)

    def enter(self, stage: Step) -> None:
        self.entered.append((stage, time.monotonic()))

    def lengths(self) -> dict[Step, float]:
        ends = [*(at for _, at in self.entered[1:]), time.monotonic()]
        return {stage: end - start for (stage, start), end in zip(self.entered, ends, strict=True)}
