"""The soak itself: trials in a row against a scripted policy, kills on schedule, and what must be true at the end."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from sandbox.bench.scripted import SUBMIT, scripted_model
from server.db import Database
from server.db.models import Trial
from server.schemas.events import GroupBody, OutcomeBody, RunStateBody, TrialBody
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.spool import Reporter
from server.schemas.states import Phase, RunState, TrialState
from server.schemas.tasks import TRAIN, TaskEntry
from server.schemas.trials import ProxyEndpoint, TrialRequest, TrialView
from trainer.rollout.runner_client import RunnerClient

from .kills import Done, Kill, kill, schedule
from .leaks import Memory, Watch
from .world import HARNESS, RUN, World, open_world

KILL_EVERY = 10
"""Trials between two kills."""
LEAK_BYTES = 48 * 1024
"""Resident bytes that each trial may add to a runner for good, over at least LEAK_TRIALS of them; they keep the request and the answer."""
LEAK_TRIALS = 150
LEAK_FDS = 4
"""Descriptors that an idle runner may have more at the end than soon after its start, when trials were under way."""
_TASKS = 16
_WARM = 32
_TRY_S = 10
_EXPLAINS = {
    Cause.RUNNER_LOST: {Kill.RUNNER, Kill.SPAWNER, Kill.SANDBOX},
    Cause.SANDBOX_SETUP: {Kill.RUNNER, Kill.SPAWNER, Kill.SANDBOX},
    Cause.AGENT_SETUP: {Kill.RUNNER, Kill.SPAWNER, Kill.SANDBOX},
    Cause.VERIFIER: {Kill.VERIFIER, Kill.SANDBOX, Kill.SPAWNER},
    Cause.VERIFIER_TIMEOUT: {Kill.VERIFIER, Kill.SANDBOX, Kill.SPAWNER},
}
"""Which kills may cost a trial its verdict, and how."""
_RESTART_S = {Kill.SPAWNER: 10.0, Kill.RUNNER: 10.0}
"""How long a runner that is about to end may still accept trials."""


@dataclass
class Played:
    trial_id: str
    task: str
    solves: bool
    begun: float
    ended: float
    outcome: Scored | Failed
    exit_code: int | None = None
    diff: str | None = None


@dataclass
class Soak:
    world: World
    model: str
    rng: random.Random
    scripts: dict[str, list[str]]
    reporter: Reporter
    client: RunnerClient
    played: list[Played] = field(default_factory=list)
    kills: list[Done] = field(default_factory=list)
    finished: int = 0

    async def trial(self, number: int, task: str) -> None:
        trial_id, solves = f"s{number:05}", self.rng.random() < 0.6
        self.scripts[trial_id] = _script(self.world, task, solves, self.rng)
        proxy = ProxyEndpoint.model_validate({"url": f"{self.model}/rollout/{trial_id}", "key": "k" * 40})
        request = TrialRequest(trial_id=trial_id, task=task, harness=HARNESS, proxy=proxy)
        self.reporter.report(TrialBody(trial_id=trial_id, state=TrialState.QUEUED, stage=Stage.QUEUED, group_id=f"g-{task}", sample=number))
        begun = time.time()
        answer = await self.client.run(request)
        outcome = answer if isinstance(answer, Failed) else answer.outcome
        assert outcome is not None
        played = Played(trial_id, task, solves, begun, time.time(), outcome)
        if isinstance(answer, TrialView):
            played.exit_code = answer.exit_code
            played.diff = _diff(self.world, answer)
        self.reporter.report(OutcomeBody(trial_id=trial_id, outcome=outcome))
        self.played.append(played)
        self.finished += 1

    async def kill_on_schedule(self, kinds: list[Kill], trials: int) -> None:
        for number, kind in enumerate(kinds, 1):
            while self.finished < number * trials // (len(kinds) + 1):  # noqa: ASYNC110 -- a poll is exact enough here
                await asyncio.sleep(0.02)
            deadline = time.monotonic() + _TRY_S
            while time.monotonic() < deadline and self.finished < trials:
                done = kill(kind, self.world.runner, self.world.run.root / "sandboxes", self.rng)
                if done is not None:
                    self.kills.append(done)
                    break
                await asyncio.sleep(0.01)


async def soak(trials: int, at_once: int, seed: int, keep: Path | None = None) -> dict[str, object]:
    """Play `trials` trials, `at_once` at a time, with a kill every KILL_EVERY. The answer's `problems` is empty when all went well."""
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        async with open_world(keep or Path(scratch), _TASKS, at_once, seed) as world:
            watch, memory = Watch(world.run.root / "sandboxes"), Memory()
            started = time.monotonic()
            played = await _play(world, trials, at_once, seed, watch, memory)
            wall = time.monotonic() - started
            starts = world.starts
        left = watch.left()
        recorded = await asyncio.to_thread(_recorded, world)
        return _report(played, trials, left, memory, recorded) | {
            "seed": seed,
            "at_once": at_once,
            "wall_s": round(wall, 1),
            "trials_per_s": round(trials / wall, 2),
            "runner_starts": starts,
        }


async def _play(world: World, trials: int, at_once: int, seed: int, watch: Watch, memory: Memory) -> Soak:
    rng = random.Random(seed)
    entries = [TaskEntry.model_validate_json(line) for line in (world.run.tasks / TRAIN / "index.jsonl").read_text().splitlines()]
    scripts: dict[str, list[str]] = {}
    reporter = Reporter(world.url, RUN, world.token, "trainer", world.run.spool)
    client = RunnerClient(world.run.runner_file, world.token)
    reporter.report(RunStateBody(state=RunState.RUNNING))
    for entry in entries:
        body = GroupBody(group_id=f"g-{entry.task}", step=1, phase=Phase.TRAIN, task=entry.task, harness=HARNESS, size=-(-trials // _TASKS))
        reporter.report(body)
    async with scripted_model(lambda rollout, turn: scripts[rollout][turn] if turn < len(scripts[rollout]) else None) as model:
        run = Soak(world, model, rng, scripts, reporter, client)
        slots = asyncio.Semaphore(at_once)

        async def one(number: int) -> None:
            async with slots:
                await run.trial(number, entries[number % len(entries)].task)

        looking = asyncio.create_task(_look(run, watch, memory))
        killing = asyncio.create_task(run.kill_on_schedule(schedule(rng, trials // KILL_EVERY), trials))
        await asyncio.gather(*(one(number) for number in range(trials)))
        await killing
        looking.cancel()
    await client.close()
    await asyncio.sleep(2)  # until the runner has closed our connections
    memory.end(world.runner)
    await asyncio.to_thread(reporter.close, 60)
    return run


async def _look(run: Soak, watch: Watch, memory: Memory) -> None:
    while True:
        await asyncio.to_thread(watch.look, run.world.runner)
        await asyncio.to_thread(memory.look, run.world.runner, run.finished)
        await asyncio.sleep(0.5)


def _script(world: World, task: str, solves: bool, rng: random.Random) -> list[str]:
    repair = (world.run.tasks / TRAIN / task / "solution" / "solve.sh").read_text().splitlines()[-1]
    pause = f"sleep {rng.choice([0, 0, 0.2, 0.5])}; ls"
    return [pause, *([repair] if solves else []), pause, SUBMIT]


def _diff(world: World, view: TrialView) -> str | None:
    """The archived diff, as text that two equal diffs have in common."""
    for artifact in view.artifacts:
        if artifact.name == "diff":
            steps = json.loads((world.run.root / artifact.path).read_bytes())
            return json.dumps(sorted((kind, path, base64.b64decode(data).decode(errors="replace")) for kind, path, _, data in steps))
    return None


def _recorded(world: World) -> dict[str, str]:
    """Trial → what the record says of it."""
    db = Database(f"sqlite:///{world.data.database}")
    with db.read() as session:
        rows = session.execute(sa.select(Trial.trial_id, Trial.kind, Trial.reward, Trial.cause).where(Trial.run_id == RUN)).all()
    db.close()
    return {trial: str(cause if kind == "failed" else reward) for trial, kind, reward, cause in rows}


def _report(run: Soak, trials: int, left: dict[str, list[str]], memory: Memory, recorded: dict[str, str]) -> dict[str, object]:
    outcomes = Counter(played.outcome.cause if isinstance(played.outcome, Failed) else played.outcome.termination for played in run.played)
    slopes = memory.slopes(_WARM)
    problems = [f"lost: {trials - len(run.played)} trials have no outcome"] if len(run.played) != trials else []
    problems += wrong_verdicts(run.played) + unexplained(run.played, run.kills)
    problems += [f"left behind: {kind}: {', '.join(found[:5])} ({len(found)})" for kind, found in left.items() if found]
    said = {
        played.trial_id: played.outcome.cause if isinstance(played.outcome, Failed) else str(played.outcome.reward) for played in run.played
    }
    problems += [f"record: {trial} is {recorded.get(trial)}, it was {word}" for trial, word in said.items() if recorded.get(trial) != word]
    for slope in slopes:
        if slope["trials"] >= LEAK_TRIALS and slope["bytes_per_trial"] > LEAK_BYTES:
            problems.append(f"memory grows: {slope}")
    if memory.idle_fds[1] > memory.idle_fds[0] + LEAK_FDS:
        problems.append(
            f"descriptors grow: {memory.idle_fds[0]} soon after the start of the last runner, {memory.idle_fds[1]} when it was idle"
        )
    return {
        "trials": trials,
        "solved": sum(isinstance(played.outcome, Scored) and played.outcome.reward for played in run.played),
        "outcomes": dict(outcomes),
        "kills": dict(Counter(done.kind.value for done in run.kills)),
        "memory": slopes,
        "idle_fds": memory.idle_fds,
        "left": {kind: len(found) for kind, found in left.items()},
        "problems": problems,
    }


def wrong_verdicts(played: list[Played]) -> list[str]:
    """A diff has one reward, an empty one none, an honest agent that came to its end what its diff deserves, and nobody tampered."""
    found: list[str] = []
    rewards: dict[tuple[str, str], set[int]] = {}
    for trial in played:
        outcome = trial.outcome
        if isinstance(outcome, Failed):
            continue
        if outcome.termination is Termination.TAMPERED:
            found.append(f"verdict: {trial.trial_id} counts as tampered: {outcome.detail}")
        if trial.diff is None:
            found.append(f"verdict: {trial.trial_id} was scored without a diff ({outcome.termination}: {outcome.detail})")
            continue
        rewards.setdefault((trial.task, trial.diff), set()).add(outcome.reward)
        if trial.diff == "[]" and outcome.reward:
            found.append(f"verdict: {trial.trial_id} changed nothing and scored")
        if trial.exit_code == 0 and outcome.reward != trial.solves:
            found.append(f"verdict: {trial.trial_id} came to its end, solves={trial.solves}, reward {outcome.reward}: {outcome.detail}")
    return found + [f"verdict: one diff of {task} had both rewards" for (task, _), both in rewards.items() if len(both) > 1]


def unexplained(played: list[Played], kills: list[Done]) -> list[str]:
    found = []
    for trial in played:
        if isinstance(outcome := trial.outcome, Failed):
            during = {done.kind for done in kills if trial.begun - _RESTART_S.get(done.kind, 0) <= done.at <= trial.ended}
            if Kill.AGENT in during and outcome.cause is Cause.RUNNER_LOST and "reset by peer" in outcome.detail:
                continue  # its process was killed before it had taken its orders
            if not during & _EXPLAINS.get(outcome.cause, set()):
                found.append(f"failed: {trial.trial_id} {outcome.cause} in {outcome.stage} without a kill: {outcome.detail}")
    return found
