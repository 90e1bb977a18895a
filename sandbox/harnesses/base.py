"""What all harness adapters are: Harbor agents that the runner binds to one rollout after Harbor made them.

Harbor writes an agent's options into its trial directory, so what is secret or alive is not passed as an option.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, override
from urllib.parse import urlsplit

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from sandbox.environments.backend import Sandbox
from sandbox.environments.errors import NotStarted, SandboxError
from sandbox.integrity.environment import TrialEnvironment
from server.schemas.runspec import Harness
from server.schemas.trials import ProxyEndpoint

from .logs import Entry, LogBook
from .pins import Pin
from .store import RuntimeMissing, Store
from .warm import WarmParent, WarmStartError

AGENT_LOGS = "/logs/agent"
STREAM = "stream.jsonl"
"""The harness's own log, below AGENT_LOGS."""
# The log is written in the sandbox, so that a trial that runs out of time still has it.
_TO_LOGS = f'exec "$@" >{AGENT_LOGS}/{STREAM} 2>{AGENT_LOGS}/stderr.log'


class HarnessError(Exception):
    """The harness could not be run, through no doing of its own or the policy's."""


class HarnessNotStarted(HarnessError):
    """Its process never came to be: no model was asked, and nothing of the policy's ran."""


@dataclass(slots=True)
class Launcher:
    """A harness made ready once per runner: its verified runtime and, for a warm start, the parent process.

    `script` is for `reference.Script`, which is no harness; `watch` is for who wants to see a sandbox while the harness runs in it.
    """

    harness: Harness
    tree: Path | None = None
    parent: WarmParent | None = None
    script: str = ""
    watch: Callable[[Sandbox], AbstractAsyncContextManager[None]] | None = None

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
    context: int
    """Longest sequence in tokens: the window that the harness is told, and compacts by."""
    max_output_tokens: int
    """Per turn."""


class HarnessAgent(BaseAgent):
    """Runs a harness in the sandbox until it ends by itself. Any exit code is an end; only what the host did wrong is raised."""

    pin: ClassVar[Pin | None] = None
    starts: ClassVar[tuple[str, ...]] = ("exec",)
    prompts: ClassVar[tuple[str, ...]] = ("full",)
    calls_tools: ClassVar[bool] = True
    """On the wire. Turns of one that does not are all turns without a tool call."""
    memory_mb: ClassVar[int] = 32
    """What the harness itself needs; a smaller `sandbox.limits.memory_mb` is refused before the run."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Where its own log lies: patterns of files below the trial's agent directory."""
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
        if harness.start not in cls.starts:
            raise ValueError(f"harnesses: {harness.name} cannot be started by {harness.start}, only by {' or '.join(cls.starts)}")
        if harness.prompt not in cls.prompts:
            raise ValueError(f"harnesses: {harness.name} has no prompt {harness.prompt}, only {' or '.join(cls.prompts)}")
        if cls.pin is None:
            return Launcher(harness)
        if harness.version != cls.pin.version:
            raise ValueError(f"harnesses: {harness.name} is pinned to {cls.pin.version}, the spec asks for {harness.version}")
        try:
            store.hold(cls.pin)
            return Launcher(harness, await asyncio.to_thread(store.verify, cls.pin, deep=False))
        except RuntimeMissing as error:
            if not harness.adapter:
                raise
            raise RuntimeMissing(f"{harness.name} is not installed in {store.root}; run `rl harness install {harness.adapter}`") from error

    @classmethod
    def note(cls, entry: Entry, book: LogBook) -> bool:
        """Take the facts of one record of the harness's own log. False when its kind is not known."""
        return False

    @classmethod
    def needs_mb(cls, harness: Harness) -> int:
        """`memory_mb`, where it does not depend on the entry of the list."""
        return cls.memory_mb

    def bind(self, rollout: Rollout) -> None:
        self.rollout = rollout

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        self.rollout.on_setup()

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """One exception class for all that goes wrong: Harbor decides by class name whether there is something to grade."""
        assert isinstance(environment, TrialEnvironment)  # noqa: S101 -- the runner names the class
        context.model_usage = {}  # what is not there Harbor reads from a file that the agent may write, and ends the trial over it
        watch = self.rollout.launcher.watch
        try:
            async with watch(environment.sandbox) if watch else contextlib.nullcontext():
                await self.launch(instruction, environment)
        except HarnessNotStarted:
            raise
        except (HarnessError, SandboxError, WarmStartError, OSError) as error:
            raise HarnessError(str(error)) from error
        except Exception as error:  # an adapter is anybody's code: a fault of it says nothing about the policy, and must not be graded
            raise HarnessError(f"the adapter of {self.name()} failed: {type(error).__name__}: {error}") from error

    @abstractmethod
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        """Run the harness to its end, set `exit_code`, write `harness.log`; call `rollout.on_start` when its process is there."""

    @property
    def tree(self) -> Path:
        """The runtime, mounted read-only at this path in the sandbox too."""
        tree = self.rollout.launcher.tree
        assert tree is not None  # noqa: S101 -- for harnesses that have a pin
        return tree

    async def start(self, environment: TrialEnvironment, argv: Sequence[str], env: Mapping[str, str], stdin: str) -> None:
        """Run a program of the harness to its end, its output in the agent's logs."""
        await self.start_bare(environment, ["/bin/sh", "-c", _TO_LOGS, self.name(), *argv], env, stdin.encode())

    async def start_bare(self, environment: TrialEnvironment, argv: Sequence[str], env: Mapping[str, str], stdin: bytes) -> bytes:
        """Run a program of the harness to its end; what it printed."""
        self.rollout.on_start()
        try:
            result = await environment.sandbox.exec(argv, env=env, stdin=stdin)
        except NotStarted as error:
            raise HarnessNotStarted(str(error)) from error
        self.exit_code = result.return_code
        return result.stdout + result.stderr

    def api_url(self, environment: TrialEnvironment, suffix: str) -> str:
        """The rollout's address at the proxy as the sandbox sees it: through the gate, with the rollout's path."""
        assert environment.gate_url is not None  # noqa: S101 -- the runner always sets a gate
        return environment.gate_url + urlsplit(self.rollout.proxy.url).path.rstrip("/") + suffix
