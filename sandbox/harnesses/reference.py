"""Agents that are no harness: the task's own solution, doing nothing, or a given script. They go through whole trials."""

from __future__ import annotations

from typing import override

from sandbox.integrity.environment import TrialEnvironment

from .base import HarnessAgent


class _ShellAgent(HarnessAgent):
    async def _shell(self, environment: TrialEnvironment, script: bytes) -> None:
        (self.logs_dir / "harness.log").write_bytes(await self.start_bare(environment, ["/bin/bash", "-s"], {}, script))


class Oracle(_ShellAgent):
    """Runs `solution/solve.sh`, which it gets over standard input."""

    @staticmethod
    @override
    def name() -> str:
        return "oracle"

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        await self._shell(environment, (self.rollout.task / "solution" / "solve.sh").read_bytes())


class Noop(_ShellAgent):
    @staticmethod
    @override
    def name() -> str:
        return "noop"

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        self.rollout.on_start()
        self.exit_code = 0


class Script(_ShellAgent):
    """Runs the launcher's script: a cheat, or what a test wants an agent to do."""

    @staticmethod
    @override
    def name() -> str:
        return "script"

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        await self._shell(environment, self.rollout.launcher.script.encode())
