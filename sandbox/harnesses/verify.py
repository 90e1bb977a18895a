"""One real run of a pinned harness: namespace sandbox, the real proxy over a scripted policy, every host look-up recorded."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from sandbox.tasks.onebug import OneBug, generate
from server.schemas.outcome import Scored, Stage
from server.schemas.runspec import Harness
from server.schemas.scripted import ScriptedTurn, Voice

from .hands import HANDS
from .stage import stage
from .store import Store

TITLE = Voice(name="title", says=["You are a title generator"], turns=[ScriptedTurn(text="A repair")])
"""OpenCode names each conversation by a call of its own."""


class Verification(BaseModel):
    """`turns` counts model calls. `foreign_hosts` are the names that were looked up in the sandbox: there is nothing to find but the proxy.

    `setup_s` is the time until the harness may run: a sandbox with its runtime mounted, and the agent's own set-up. `cpu_s` is the CPU
    time of the agent's sandbox, `rss_mb` the peak of its largest process.
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


async def verify(harness: Harness, store: Store) -> Verification:
    """Raises VerifyError, or NotReady when this machine cannot run the harness."""
    async with stage([harness], store) as open_stage:
        played = await open_stage.play(harness.name, [TITLE, repair_voice(harness.name, task())])
    return Verification(
        harness=harness.name,
        version=harness.version,
        reward=played.outcome.reward if isinstance(played.outcome, Scored) else None,
        turns=len(played.end.record.turns),
        violations=played.end.record.violations,
        foreign_hosts=sorted(played.foreign_hosts),
        setup_s=round(sum(played.stages.get(step, 0.0) for step in (Stage.SANDBOX_SETUP, Stage.AGENT_SETUP)), 3),
        cpu_s=round(played.cpu_s, 2),
        rss_mb=round(played.rss_mb),
        problem=("the rollout's key was on a command line" if played.key_in_argv else played.end.error)
        or ("" if isinstance(played.outcome, Scored) else f"{played.outcome.cause}: {played.outcome.detail}"),
    )
