"""mini-swe-agent, unmodified: forked from a warm parent, or by its own `mini` command line."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, override

from sandbox.environments.namespace.sandbox import Sandbox as NamespaceSandbox
from sandbox.environments.spec import DEFAULT_ENV
from sandbox.integrity.environment import TrialEnvironment
from server.schemas.harnesslog import LogEventKind
from server.schemas.runspec import Harness

from .base import AGENT_LOGS, HarnessAgent, Launcher
from .logs import Entry, LogBook
from .pins import MINI_SWE_AGENT, Pin
from .selfcontained import python_of
from .store import Store
from .warm import WarmParent

_PROGRAM = Path(__file__).with_name("mini_parent.py")
_TRAJECTORY = f"{AGENT_LOGS}/trajectory.json"
# What the console script does, with the runtime's tree as the only place to import from. The task comes over standard input: an argument
# of a process is at most 128 KiB long.
_CLI = """
import sys
sys.path.append(sys.argv.pop(1))
sys.argv[0] = "mini"
sys.argv += ["-t", sys.stdin.read()]
from minisweagent.run.mini import app
app()
"""
_CLI_SETTINGS = {
    "IS_SANDBOX": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",  # noqa: S108 -- in the sandbox
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class MiniSweAgent(HarnessAgent):
    pin: ClassVar[Pin | None] = MINI_SWE_AGENT
    starts: ClassVar[tuple[str, ...]] = ("exec", "warm_fork")
    reads: ClassVar[tuple[str, ...]] = ("trajectory.json",)

    @staticmethod
    @override
    def name() -> str:
        return MINI_SWE_AGENT.name

    @classmethod
    @override
    def needs_mb(cls, harness: Harness) -> int:
        """A fork shares what its parent has imported."""
        return 256 if harness.start == "exec" else cls.memory_mb

    @classmethod
    @override
    async def prepare(cls, harness: Harness, store: Store) -> Launcher:
        launcher = await super().prepare(harness, store)
        if harness.start == "warm_fork":
            assert launcher.tree is not None  # noqa: S101 -- this harness has a pin
            launcher.parent = WarmParent(_PROGRAM, launcher.tree)
            await launcher.parent.ensure()
        return launcher

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        if self.rollout.launcher.parent is not None:
            await self._fork(instruction, environment, self.rollout.launcher.parent)
        else:
            await self._exec(instruction, environment)

    async def _fork(self, instruction: str, environment: TrialEnvironment, parent: WarmParent) -> None:
        order = {
            "instruction": instruction,
            "url": self.api_url(environment, "/v1"),
            "key": self.rollout.proxy.key.get_secret_value(),
            "cwd": environment.workdir,
            "output": _TRAJECTORY,
            "environ": dict(DEFAULT_ENV),
        }
        sandbox = environment.sandbox
        assert isinstance(sandbox, NamespaceSandbox)  # noqa: S101 -- the runner refuses to fork into any other
        target = await sandbox.fork_target()
        try:
            forked = await parent.fork(target, order)
        finally:
            target.close()
        self.rollout.on_start()
        self.exit_code, output = await forked.wait()
        (self.logs_dir / "harness.log").write_bytes(output)

    async def _exec(self, instruction: str, environment: TrialEnvironment) -> None:
        command = [python_of(self.tree), "-I", "-B", "-c", _CLI, str(self.tree), "-m", "openai/policy"]
        command += ["-y", "--exit-immediately", "-l", "0", "-c", "mini.yaml", "-o", _TRAJECTORY]
        command += ["-c", f"model.model_kwargs.api_base={self.api_url(environment, '/v1')}"]
        env = _CLI_SETTINGS | {"OPENAI_API_KEY": self.rollout.proxy.key.get_secret_value()}
        (self.logs_dir / "harness.log").write_bytes(await self.start_bare(environment, command, env, instruction.encode()))

    @classmethod
    @override
    def note(cls, entry: Entry, book: LogBook) -> bool:
        """Its trajectory is one document. It runs the calls of a turn one after the other."""
        book.named(entry.text("info", "mini_version"))
        book.stopped(entry.text("info", "exit_status"))
        book.log.turns = entry.count("info", "model_stats", "api_calls")
        book.log.cost_usd = entry.number("info", "model_stats", "instance_cost")
        last, turn = None, 0
        for message in entry.items("messages"):
            time = message.number("extra", "timestamp")
            match message.text("role"):
                case "assistant":
                    last, turn = time, turn + 1
                    for call in message.items("tool_calls"):
                        book.began(call.text("id"), call.text("function", "name"), time)
                case "tool":
                    code = message.number("extra", "returncode")
                    ok = None if code is None or code < 0 else code == 0  # -1: it did not run, or not to its end
                    book.ended(message.text("tool_call_id"), time, ok, since=last)
                    last = time
                case "user" if kind := message.text("extra", "interrupt_type"):
                    book.note(LogEventKind.ERROR, message.text("content"), name=kind, turn=turn)  # the turn that it could not use
                    turn += 1
        return bool(entry.items("messages"))
