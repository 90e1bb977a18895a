"""One real run of a pinned harness: namespace sandbox, the real proxy over a scripted policy, every host look-up recorded.

The proxy is a process of the learning side (`python -m trainer.scripted`); this side speaks to it by standard input and output, the
harness by HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, SecretStr

from sandbox.environments.namespace.sandbox import Sandbox
from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import decide
from sandbox.runner.service import open_room
from sandbox.tasks.onebug import OneBug, generate
from server.schemas.outcome import Failed, Scored, Stage
from server.schemas.runspec import Harness, RunSpec
from server.schemas.scripted import ScriptedEnd, ScriptedOrder, ScriptedReady, ScriptedTurn, Voice
from server.schemas.trials import TrialRequest

from .hands import HANDS
from .lookups import recorded
from .store import Store

CONTEXT = 400_000
"""Tokens, which are bytes here: about 100,000 of a real vocabulary."""
_MAX_OUTPUT = 20_000
_ANSWER_S = 180


class VerifyError(Exception):
    """The verification itself cannot run; the message says what to do."""


class Verification(BaseModel):
    """`turns` counts model calls. `foreign_hosts` are the names that were looked up in the sandbox: there is nothing to find but the proxy.

    `setup_s` is the agent's set-up, `cpu_s` the CPU time of the agent's sandbox, `rss_mb` the peak of its largest process.
    """

    model_config = ConfigDict(extra="forbid")

    harness: str
    version: str
    reward: int | None
    turns: int
    violations: list[str]
    foreign_hosts: list[str]
    setup_s: float
    cpu_s: float
    rss_mb: float
    problem: str = ""
    """Why there is no reward; empty when there is one."""

    @property
    def good(self) -> bool:
        return self.reward == 1 and not self.violations and not self.foreign_hosts


@dataclass
class Played:
    """A whole trial with a scripted policy."""

    outcome: Scored | Failed
    end: ScriptedEnd
    exit_code: int | None
    foreign_hosts: set[str]
    stages: dict[Stage, float]
    """Seconds by stage."""
    cpu_s: float
    rss_mb: float


def task() -> OneBug:
    return generate(0, 1, held_out=False)[0]


def repair_voice(harness: str, bug: OneBug) -> Voice:
    """List, read, edit, run, finish."""
    hands, path = HANDS[harness], f"/workspace/{bug.file}"
    before, after = _changed(bug)
    turns = [hands.run("ls"), hands.read(path), hands.edit(path, before, after), hands.run(f"python3 -B {bug.file}; echo ran")]
    return Voice(name="main", says=[bug.issue], turns=[*turns, *hands.finish])


def _changed(bug: OneBug) -> tuple[str, str]:
    """The function that differs, before and after."""
    pairs = zip(bug.source.split("\n\n"), bug.fixed.split("\n\n"), strict=True)
    return next((old, new) for old, new in pairs if old != new)


async def verify(harness: Harness, store: Store) -> Verification:
    """Raises VerifyError, or NotReady when this machine cannot run the harness."""
    bug = task()
    extra = (
        [Voice(name="title", says=["You are a title generator"], turns=[ScriptedTurn(text="A repair")])]
        if harness.name == "opencode"
        else []
    )
    played = await play(harness, store, [*extra, repair_voice(harness.name, bug)])
    return Verification(
        harness=harness.name,
        version=harness.version,
        reward=played.outcome.reward if isinstance(played.outcome, Scored) else None,
        turns=len(played.end.record.turns),
        violations=played.end.record.violations,
        foreign_hosts=sorted(played.foreign_hosts),
        setup_s=round(played.stages.get(Stage.AGENT_SETUP, 0.0), 3),
        cpu_s=round(played.cpu_s, 2),
        rss_mb=round(played.rss_mb),
        problem=played.end.error or ("" if isinstance(played.outcome, Scored) else f"{played.outcome.cause}: {played.outcome.detail}"),
    )


@dataclass
class _Watch:
    """What the host sees of the agent's sandbox while the harness runs."""

    host: psutil.Process
    names: set[str] = field(default_factory=set)
    peak: int = 0

    @contextlib.asynccontextmanager
    async def __call__(self, sandbox: Sandbox) -> AsyncIterator[None]:
        async with recorded(sandbox, self.names):
            looking = asyncio.create_task(self._look())
            try:
                yield
            finally:
                looking.cancel()

    async def _look(self) -> None:
        while True:
            for process in self.host.children(recursive=True):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    status = Path(f"/proc/{process.pid}/status").read_text()  # noqa: ASYNC240 -- no disk behind it
                    self.peak = max(self.peak, int(status.partition("VmHWM:")[2].split()[0]) << 10)
            await asyncio.sleep(0.1)


@dataclass
class _Clock:
    entered: list[tuple[Stage, float]] = field(default_factory=list)

    def enter(self, stage: Stage) -> None:
        self.entered.append((stage, time.monotonic()))

    def lengths(self) -> dict[Stage, float]:
        ends = [*(at for _, at in self.entered[1:]), time.monotonic()]
        return {stage: end - start for (stage, start), end in zip(self.entered, ends, strict=True)}


async def play(harness: Harness, store: Store, voices: Sequence[Voice], context: int = CONTEXT, **limits: int) -> Played:
    """One trial of the task `task()`. `limits` are those of the sandbox. Raises VerifyError or NotReady."""
    with tempfile.TemporaryDirectory(prefix="lego-verify-") as scratch:
        root = Path(scratch)
        (root / "trials").mkdir()
        spec = _spec(harness, context, limits)
        order = ScriptedOrder(
            rollout_id="verify",
            key=SecretStr(secrets.token_urlsafe(32)),
            harness=harness.name,
            context=context,
            max_tokens=_MAX_OUTPUT,
            voices=list(voices),
        )
        async with open_room(spec, store, root / "tasks", root / "trials", root / "sandboxes") as (room, host), _proxy(order) as proxy:
            watch = _Watch(psutil.Process(host.pid))
            room.launchers[harness.name].watch = watch
            return await _trial(room, harness.name, order, proxy, watch)


async def _trial(room: Room, harness: str, order: ScriptedOrder, proxy: _Proxy, watch: _Watch) -> Played:
    clock = _Clock()
    (name,) = room.index["train"]
    endpoint = {"url": proxy.url, "key": order.key.get_secret_value()}
    request = TrialRequest.model_validate({"trial_id": order.rollout_id, "task": name, "harness": harness, "proxy": endpoint})
    attempt = Attempt(room, request, order.rollout_id, clock)
    facts = await attempt.run()
    return Played(
        outcome=decide(facts),
        end=await proxy.close(),
        exit_code=attempt.exit_code,
        foreign_hosts=watch.names,
        stages=clock.lengths(),
        cpu_s=attempt.cpu_s,
        rss_mb=watch.peak / 2**20,
    )


def _spec(harness: Harness, context: int, limits: dict[str, int]) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"path": "builtin:none", "context": context},
            "harnesses": [harness.model_dump()],
            "data": {"family": "onebug", "train_tasks": 1, "held_out_tasks": 1},
            "sandbox": {"limits": {"memory_mb": 2048, "processes": 256, "cpu_s": 120, "disk_mb": 512} | limits},
            "rollout": {"max_new_tokens": _MAX_OUTPUT},
        }
    )


@dataclass
class _Proxy:
    url: str
    process: asyncio.subprocess.Process

    async def close(self) -> ScriptedEnd:
        return ScriptedEnd.model_validate_json(await _ask(self.process, b"close\n"))


@contextlib.asynccontextmanager
async def _proxy(order: ScriptedOrder) -> AsyncIterator[_Proxy]:
    if importlib.util.find_spec("renderers") is None:
        raise VerifyError("the proxy belongs to the learning side, which is not installed here: run `uv sync --extra trainer --inexact`")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "trainer.scripted"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=64 << 20,
    )  # fmt: skip
    try:
        ready = await _ask(process, order.model_dump_json().encode() + b"\n")
        yield _Proxy(ScriptedReady.model_validate_json(ready).url, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ask(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None  # noqa: S101 -- asked for when it was started
    process.stdin.write(line)
    try:
        async with asyncio.timeout(_ANSWER_S):
            if answer := await process.stdout.readline():
                return answer
    except TimeoutError:
        pass
    raise VerifyError("the proxy with the scripted policy did not answer; what it wrote is above")
