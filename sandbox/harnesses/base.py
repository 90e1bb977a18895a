"""What all harness adapters are: Harbor agents that the runner binds to one rollout after Harbor made them.

Harbor writes an agent's options into its trial directory, so what is secret or alive is not passed as an option.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, override
from urllib.parse import urlsplit

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from sandbox.environments.namespace.channel import SandboxError
from sandbox.integrity.environment import TrialEnvironment
from server.schemas.runspec import Harness
from server.schemas.trials import ProxyEndpoint

from .pins import Pin
from .store import Store
from .warm import WarmParent, WarmStartError

AGENT_LOGS = "/logs/agent"


class HarnessError(Exception):
    """The harness could not be run, through no doing of its own or the policy's."""


@dataclass(slots=True)
class Launcher:
    """A harness made ready once per runner: its verified runtime and, for a warm start, the parent process.

    `script` is for `reference.Script`, which is no harness.
    """

    harness: Harness
    tree: Path | None = None
    parent: WarmParent | None = None
    script: str = ""

    async def stop(self) -> None:
        if self.parent is not None:
            await self.parent.stop()


@dataclass(frozen=True, slots=True)
class Rollout:
    """What an adapter needs for one trial. `on_setup` and `on_start` tell the runner how far it came."""

    launcher: Launcher
    task: Path
    proxy: ProxyEndpoint
    on_setup: Callable[[], None]
    on_start: Callable[[], None]
    max_output_tokens: int


class HarnessAgent(BaseAgent):
    """Runs a harness in the sandbox until it ends by itself. Any exit code is an end; only what the host did wrong is raised."""

    pin: ClassVar[Pin | None] = None
    starts: ClassVar[tuple[str, ...]] = ("exec",)
    exit_code: int | None = None
    rollout: Rollout

    @staticmethod
    @override
    def name() -> str:
        return "harness"

    @override
    def version(self) -> str | None:
        return self.pin.version if self.pin else None

    @classmethod
    async def prepare(cls, harness: Harness, store: Store) -> Launcher:
        """Make the harness ready; raises RuntimeStoreError, WarmStartError or ValueError with what to do."""
        if cls.pin is None:
            return Launcher(harness)
        if harness.version != cls.pin.version:
            raise ValueError(f"harnesses: {harness.name} is pinned to {cls.pin.version}, the spec asks for {harness.version}")
        if harness.start not in cls.starts:
            raise ValueError(f"harnesses: {harness.name} cannot be started by {harness.start}, only by {' or '.join(cls.starts)}")
        return Launcher(harness, await asyncio.to_thread(store.verify, cls.pin, deep=False))

    def bind(self, rollout: Rollout) -> None:
        self.rollout = rollout

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        self.rollout.on_setup()

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """One exception class for all that goes wrong: Harbor decides by class name whether there is something to grade."""
        assert isinstance(environment, TrialEnvironment)  # noqa: S101 -- the runner names the class
        try:
            await self.launch(instruction, environment)
        except (SandboxError, WarmStartError, OSError) as error:
            raise HarnessError(str(error)) from error

    @abstractmethod
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        """Run the harness to its end, set `exit_code`, write `harness.log`; call `rollout.on_start` when its process is there."""

    def api_url(self, environment: TrialEnvironment, suffix: str) -> str:
        """The rollout's address at the proxy as the sandbox sees it: through the gate, with the rollout's path."""
        assert environment.gate_url is not None  # noqa: S101 -- the runner always sets a gate
        return environment.gate_url + urlsplit(self.rollout.proxy.url).path.rstrip("/") + suffix
