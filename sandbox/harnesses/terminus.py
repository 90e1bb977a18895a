"""Terminus 2, Harbor's own agent, unmodified. It runs in the runner's process by its nature: only its tmux is in the sandbox.

So the runtime that is installed and mounted is tmux alone (the agent is the pinned Harbor of this environment), its model calls do not pass
the sandbox's gate, and its own CPU time and memory are the runner's. On the wire it uses no tool calls: its commands are JSON in the text
of a turn, and it is told what the terminal shows in user messages.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, ClassVar, override

from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from sandbox.environments.errors import SandboxError
from sandbox.environments.spec import DEFAULT_ENV
from sandbox.integrity.environment import TrialEnvironment
from server.schemas.harnesslog import LogEventKind
from server.schemas.runspec import Harness

from .base import HarnessAgent, HarnessError, Launcher
from .logs import Entry, LogBook
from .pins import TERMINUS_2, Pin
from .store import Store

if TYPE_CHECKING:
    from harbor.agents.terminus_2.terminus_2 import Terminus2

_FREE_TOKENS = 8000
"""Its own default: it summarises the conversation when fewer are left.

It counts with a tokenizer of its own and not by the proxy's `usage`, so the room for an answer is kept out of the window that it is told: a
count that is too low by more than that ends in a request that the proxy refuses, which it answers by summarising too.
"""


class Terminus(HarnessAgent):
    pin: ClassVar[Pin | None] = TERMINUS_2
    memory_mb: ClassVar[int] = 64
    calls_tools: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("trajectory.json",)
    _inner: Terminus2

    @staticmethod
    @override
    def name() -> str:
        return TERMINUS_2.name

    @classmethod
    @override
    async def prepare(cls, harness: Harness, store: Store) -> Launcher:
        # With its model client it takes seconds to import, which would stop all trials of the runner at the first one.
        await asyncio.to_thread(importlib.import_module, "harbor.agents.terminus_2.terminus_2")
        return await super().prepare(harness, store)

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        await super().setup(environment)
        assert isinstance(environment, TrialEnvironment)  # noqa: S101 -- the runner names the class
        # Where tmux does not start, it would try for minutes to install it from the network.
        started = await environment.sandbox.exec([f"{self.tree}/bin/tmux", "-V"])
        if started.return_code != 0:
            raise HarnessError(f"tmux does not start in the sandbox: {started.stderr.decode(errors='replace').strip()[-200:]}")
        from harbor.agents.terminus_2.terminus_2 import Terminus2

        rollout = self.rollout
        window = max(rollout.context - rollout.max_output_tokens, rollout.context // 2)
        limits = {"max_input_tokens": window, "max_output_tokens": rollout.max_output_tokens}
        costs = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
        self._inner = Terminus2(
            logs_dir=self.logs_dir,
            model_name="openai/policy",
            api_base=rollout.proxy.url.rstrip("/") + "/v1",
            llm_kwargs={"api_key": rollout.proxy.key.get_secret_value()},
            model_info=limits | costs,
            proactive_summarization_threshold=min(_FREE_TOKENS, window // 4),
            record_terminal_session=False,
        )
        self._inner.options.llm_kwargs = None  # it has its model client now, and would write the key into its trajectory
        with environment.scoped_exec_env(self._env):
            await self._inner.setup(environment)

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        self.rollout.on_start()
        self.exit_code = 0
        try:
            with environment.scoped_exec_env(self._env):
                await self._inner.run(instruction, environment, AgentContext())
        except SandboxError:
            raise
        except Exception as error:  # noqa: BLE001 -- where another harness exits with an error, this one raises what its model client raised
            self.exit_code = 1
            (self.logs_dir / "harness.log").write_text(f"{type(error).__name__}: {error}\n")

    @property
    def _env(self) -> dict[str, str]:
        """What it runs in the sandbox finds the pinned tmux first; the login shell in the pane sets its own path."""
        return {"PATH": f"{self.tree}/bin:{DEFAULT_ENV['PATH']}"}

    @classmethod
    @override
    def note(cls, entry: Entry, book: LogBook) -> bool:
        """Its trajectory is one document. What it calls tool calls are the keystrokes in a turn's text: the proxy saw no call."""
        book.named(entry.text("agent", "version"))
        turn = -1
        for step in entry.items("steps"):
            if step.text("extra", "context_management", "type") == "compaction":
                book.note(LogEventKind.COMPACTION, turn=max(turn, 0))
            if step.text("source") == "agent":
                turn += 1
                for call in step.items("tool_calls"):
                    book.note(LogEventKind.TOOL, name=call.text("function_name"), turn=turn)
                    if call.text("function_name") == "mark_task_complete":
                        book.stopped("task complete")
        book.log.turns = turn + 1
        return bool(entry.items("steps"))
