"""Whole Harbor trials in a sandbox environment: the oracle solves, doing nothing does not, and what cannot be promised is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from harbor import Trial, TrialAgentConfig, TrialConfig, TrialEnvironmentConfig, TrialTaskConfig
from harbor.agents.base import BaseAgent

from sandbox.environments.harbor_env import SandboxEnvironment
from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.preflight import default_mode, problems

pytestmark = [
    pytest.mark.skipif(bool(problems(default_mode())), reason="; ".join(problems(default_mode())) or "-"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TASK = """
schema_version = "1.4"
artifacts = ["/workspace"]
[agent]
timeout_sec = 20.0
[verifier]
timeout_sec = 20.0
environment_mode = "separate"
[environment]
network_mode = "no-network"
workdir = "/workspace"
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    root = tmp_path / "fix-it"
    for path, text in {
        "task.toml": TASK,
        "instruction.md": "Make answer.txt say 42.",
        "environment/workspace/answer.txt": "41\n",
        "tests/test.sh": "#!/bin/bash\nid -un\n[ $(cat /workspace/answer.txt) = 42 ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/bash\necho 42 > answer.txt\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def config(task: Path, agent: TrialAgentConfig, mounts: Any = None, **options: Any) -> TrialConfig:
    return TrialConfig(
        task=TrialTaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=agent,
        environment=TrialEnvironmentConfig(
            import_path="sandbox.environments.harbor_env:SandboxEnvironment",
            mounts=mounts,
            kwargs={"base_dir": str(task.parent / "state"), "settings": {"limits": {"memory_mb": 128}}, **options},
        ),
    )


async def rewards(configuration: TrialConfig) -> dict[str, float] | None:
    result = await (await Trial.create(configuration)).run()
    assert result.exception_info is None, result.exception_info.exception_traceback
    return result.verifier_result.rewards if result.verifier_result else None


def test_oracle_and_no_op(task: Path) -> None:
    async def main() -> tuple[Any, Any]:
        async with Host.open(task.parent / "state"):
            return await rewards(config(task, TrialAgentConfig(name="oracle"))), await rewards(config(task, TrialAgentConfig(name="nop")))

    assert asyncio.run(main()) == ({"reward": 1.0}, {"reward": 0.0})
    assert (task / "environment/workspace/answer.txt").read_text() == "41\n"
    assert list((task.parent / "state").iterdir()) == []


def test_an_environment_starts_a_spawner_of_its_own_where_none_runs(task: Path) -> None:
    assert asyncio.run(rewards(config(task, TrialAgentConfig(name="oracle")))) == {"reward": 1.0}
    assert list((task.parent / "state").iterdir()) == []


class Probe(BaseAgent):
    """Asserts from inside a trial what an agent gets; what it raises fails the trial."""

    body: Callable[[SandboxEnvironment], Coroutine[Any, Any, None]]

    @staticmethod
    def name() -> str:
        return "probe"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await type(self).body(environment)


def run_probe(task: Path, body: Callable[[SandboxEnvironment], Coroutine[Any, Any, None]], **options: Any) -> dict[str, float] | None:
    Probe.body = staticmethod(body)  # type: ignore[assignment]
    return asyncio.run(rewards(config(task, TrialAgentConfig(import_path=f"{__name__}:Probe"), **options)))


def test_what_an_agent_gets(task: Path) -> None:
    async def body(environment: SandboxEnvironment) -> None:
        result = await environment.exec("id -un; pwd; echo $ONE", env={"ONE": "1"})
        assert result.stdout == "agent\n/workspace\n1\n"
        assert (await environment.exec("touch /logs/agent/a /logs/artifacts/b")).return_code == 0
        assert (await environment.exec("mkdir -p /installed-agent && touch /installed-agent/x", user="root")).return_code == 0
        if os.geteuid() == 0:
            for path in ("/logs/x", "/logs/verifier/reward.txt", "/tests/test.sh", "/solution/x", "/installed-agent/y"):
                assert (await environment.exec(f"touch {path}")).return_code == 1
        assert await environment.is_dir("/logs/agent")
        assert await environment.is_file("/workspace/answer.txt")
        with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
            await environment.exec("sleep 60", timeout_sec=1)
        with pytest.raises(ValueError, match="not 'postgres'"):
            await environment.exec("true", user="postgres")
        with environment.with_default_user("root"):
            assert (await environment.exec("id -un")).stdout == ("root\n" if os.geteuid() == 0 else "agent\n")
        assert environment.gate_url is None

    assert run_probe(task, body) == {"reward": 0.0}


def test_the_gate_and_the_mounts_are_the_agents_only(task: Path) -> None:
    runtime = task.parent / "runtime"
    runtime.mkdir()
    (runtime / "tool").write_text("tool\n")
    (task / "tests/test.sh").write_text(
        f"#!/bin/bash\n[ ! -e {runtime} ] && ! (: < /dev/tcp/127.0.0.1/8000)\necho $((1 - $?)) > /logs/verifier/reward.txt\n"
    )

    async def body(environment: SandboxEnvironment) -> None:
        assert environment.gate_url == "http://127.0.0.1:8000"
        assert (
            await environment.exec(f"cat {runtime}/tool; exec 3<> /dev/tcp/127.0.0.1/8000 && echo connected")
        ).stdout == "tool\nconnected\n"

    async def serve() -> dict[str, float] | None:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        gate = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        Probe.body = staticmethod(body)  # type: ignore[assignment]
        mounts = [{"type": "bind", "source": str(runtime), "target": str(runtime), "read_only": True}]
        return await rewards(config(task, TrialAgentConfig(import_path=f"{__name__}:Probe"), mounts=mounts, gate=gate))

    assert asyncio.run(serve()) == {"reward": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda task: (task / "environment/workspace").rename(task / "environment/files"), "starts from that tree"),
        (lambda task: (task / "task.toml").write_text(TASK.replace("no-network", "public")), 'set network_mode = "no-network"'),
    ],
)
def test_a_task_that_cannot_be_served_is_refused(task: Path, change: Callable[[Path], Any], message: str) -> None:
    change(task)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        asyncio.run(rewards(config(task, TrialAgentConfig(name="nop"))))


def test_unknown_options_are_refused(task: Path) -> None:
    with pytest.raises(ValueError, match="Unknown option 'memory'"):
        asyncio.run(rewards(config(task, TrialAgentConfig(name="nop"), memory=5)))
