"""One real run of a pinned harness: namespace sandbox, the real proxy over a scripted policy, every host look-up recorded."""

from __future__ import annotations

import statistics

from pydantic import BaseModel, ConfigDict

from sandbox.tasks.onebug import OneBug, generate
from server.schemas.outcome import Scored, Stage
from server.schemas.runspec import Harness
from server.schemas.scripted import ScriptedTurn, Voice

from .hands import HANDS
from .stage import Played, stage
from .store import Store

TITLE = Voice(name="title", says=["You are a title generator"], turns=[ScriptedTurn(text="A repair")])
"""OpenCode names each conversation by a call of its own."""


class Verification(BaseModel):
    """`turns` counts model calls. `foreign_hosts` are the names that were looked up in the sandbox: there is nothing to find but the proxy.

    `setup_s` is the time until the harness may run: a sandbox with its runtime mounted, and the agent's own set-up. `cpu_s` is the CPU
    time of the agent's sandbox, `rss_mb` the peak of its largest process. Of several runs: the worst reward, everything that was violated
    or looked up, the medians of times, the highest peak.
    """

    model_config = ConfigDict(extra="forbid")

    harness: str
    version: str
    runs: int = 1
    reward: int | None
    turns: int
    violations: list[str]
    foreign_hosts: list[str]
    setup_s: float
    cpu_s: float
    rss_mb: float
    problem: str = ""
    """Why there is no reward, or what else must not be; empty when all is well."""

    @property
    def good(self) -> bool:
        return self.reward == 1 and not (self.violations or self.foreign_hosts or self.problem)


def task() -> OneBug:
    """The task of every `stage`."""
    return generate(0, 1, held_out=False)[0]


def repair_voice(harness: str, bug: OneBug) -> Voice:
    """List, read, edit, run, finish."""
    hands, path = HANDS[harness], f"/workspace/{bug.file}"
    pairs = zip(bug.source.split("\n\n"), bug.fixed.split("\n\n"), strict=True)
    before, after = next((old, new) for old, new in pairs if old != new)
    turns = [hands.run("ls"), hands.read(path), hands.edit(path, before, after), hands.run(f"python3 -B {bug.file}; echo ran")]
    return Voice(name="main", says=[bug.issue], turns=[*turns, *hands.finish])


async def verify(harness: Harness, store: Store, runs: int = 1) -> Verification:
    """`runs` trials, one after the other. Raises VerifyError, or NotReady when this machine cannot run the harness."""
    voices = [TITLE, repair_voice(harness.name, task())]
    async with stage([harness], store) as open_stage:
        plays = [await open_stage.play(harness.name, voices, f"trial-{number}") for number in range(runs)]
    rewards = [played.outcome.reward if isinstance(played.outcome, Scored) else None for played in plays]
    return Verification(
        harness=harness.name,
        version=harness.version,
        runs=runs,
        reward=None if None in rewards else min(reward for reward in rewards if reward is not None),
        turns=max(len(played.end.record.turns) for played in plays),
        violations=[violation for played in plays for violation in played.end.record.violations],
        foreign_hosts=sorted({host for played in plays for host in played.foreign_hosts}),
        setup_s=round(statistics.median(_setup_s(played) for played in plays), 3),
        cpu_s=round(statistics.median(played.cpu_s for played in plays), 2),
        rss_mb=round(max(played.rss_mb for played in plays)),
        problem=next((problem for played in plays if (problem := _problem(played))), ""),
    )


def unplayed(harness: Harness, problem: str) -> Verification:
    """Of one whose runtime is not as it was installed: none of it is run."""
    return Verification(
        harness=harness.name,
        version=harness.version,
        runs=0,
        reward=None,
        turns=0,
        violations=[],
        foreign_hosts=[],
        setup_s=0,
        cpu_s=0,
        rss_mb=0,
        problem=problem,
    )


def _setup_s(played: Played) -> float:
    return sum(played.stages.get(step, 0.0) for step in (Stage.SANDBOX_SETUP, Stage.AGENT_SETUP))


def _problem(played: Played) -> str:
    if played.key_in_argv:
        return "the rollout's key was on a command line"
    failed = "" if isinstance(played.outcome, Scored) else f"{played.outcome.cause}: {played.outcome.detail}"
    return played.end.error or failed
