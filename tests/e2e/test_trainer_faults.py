"""What may happen to a trainer in the middle of a step: it or a process of it is killed, or its machine's network to the server is cut.

Real control plane, supervisor, verl and Ray; a relay between them and the server, and a runner that plays trials without sandboxes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import sqlalchemy as sa
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from torch.utils.data import RandomSampler

from server.app import create_app
from server.db import Database
from server.db.models import CaptureRow, EventRow, FindingRow, Group, Metric, Run, StepDone, Trial
from server.launchers.identity import OwnedProcess, kill_marked
from server.schemas.rundir import ProxyFile, RunDir, write_atomic
from server.schemas.states import Phase, RunState, TrialState
from server.settings import Settings
from tests.support.playing_runner import TASKS
from tests.support.relay import Relay
from tests.support.whole import until
from trainer.launch import PERHAPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
RUNNER = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.playing_runner import main; main()"
PER_STEP, SIZE = 3, 4


@dataclass
class World:
    relay: Relay
    settings: Settings
    db: Database
    policy: Path
    run_id: str = ""
    run: RunDir = field(default_factory=lambda: RunDir(Path()))

    def start(self, steps: int, held: int, **trainer: Any) -> None:
        """Held in the middle of step `held`."""
        document = {
            "extends": "local",
            "model": {"path": str(self.policy), "context": 400},
            "harnesses": [{"name": "fake", "version": "1"}],
            "sandbox": {"concurrency": 8},
            "rollout": {"tasks_per_step": PER_STEP, "group_size": SIZE, "max_new_tokens": 8, "max_turns": 4},
            "algorithm": {"clip_low": 0.2, "clip_high": 0.28},
            "trainer": {"steps": steps, "evaluation": {"rollouts": 2}} | trainer,
            "monitors": {"stall_s": 2},
        }
        headers = {"authorization": f"Bearer {self.settings.data.token.read_text().strip()}"}
        with httpx.Client(base_url=self.relay.url, headers=headers, timeout=60, trust_env=False) as http:
            planned = http.post("/api/plans", json={"document": document, "overrides": {}})
            assert planned.is_success, planned.text
            started = http.post("/api/runs", json={"digest": planned.json()["digest"]})
            assert started.is_success, started.text
        self.run_id = started.json()["run_id"]
        self.run = RunDir(self.settings.data.runs / self.run_id)
        self.hold(held)

    def hold(self, step: int) -> None:
        """Trials of training steps before `step` go on. The runner looks at any moment: it must not find an empty file."""
        write_atomic(self.run.root / "hold", str(step))

    def steps(self) -> int:
        """As the record has them."""
        with self.db.read() as session:
            return session.scalar(sa.select(sa.func.count()).select_from(StepDone)) or 0

    def has_steps(self, steps: int) -> None:
        until(lambda: self.under_way() and self.steps() == steps, f"step {steps} in the record")

    def spooled(self, source: str, what: str) -> int:
        """Events on disk that say so, delivered or not."""
        file = self.run.spool / f"{source}.jsonl"
        return file.read_text().count(what) if file.exists() else 0

    def in_the_middle_of(self, step: int, attempt: str = "") -> None:
        """Until all trials of the step are under way."""
        name = f'"trial_id":"s{step:03d}{attempt}-'
        until(lambda: self.under_way() and self.spooled("runner", name) == PER_STEP * SIZE, f"step {step} under way")

    def scrape(self) -> dict[str, float]:
        """The metrics of the run's proxy."""
        url = ProxyFile.model_validate_json(self.run.proxy_file.read_bytes()).metrics
        answer = httpx.get(
            f"{url}/metrics", headers={"authorization": f"Bearer {self.run.load().runner_token}"}, trust_env=False, timeout=60
        )
        return {sample.name: sample.value for family in text_string_to_metric_families(answer.text) for sample in family.samples}

    def under_way(self) -> bool:
        with self.db.read() as session:
            run = session.get_one(Run, self.run_id)
            assert run.state is not RunState.FAILED, run.problem
            return True

    def state(self) -> tuple[RunState, str]:
        with self.db.read() as session:
            run = session.get_one(Run, self.run_id)
            return run.state, run.reason

    def ends(self) -> None:
        until(lambda: self.state()[0] in (RunState.SUCCEEDED, RunState.FAILED), "the end of the run")
        with self.db.read() as session:
            run = session.get_one(Run, self.run_id)
            assert run.state is RunState.SUCCEEDED, run.problem

    def trainer(self) -> psutil.Process:
        lines = self.run.processes_file.read_text().splitlines()
        return psutil.Process([process.pid for line in lines if (process := OwnedProcess.model_validate_json(line)).role == "trainer"][-1])

    def kill(self, actor: str) -> None:
        """-9 for the process of the trainer's that runs this Ray actor."""
        children = self.trainer().children(recursive=True)
        (found,) = [child for child in children if child.cmdline()[:1] and child.cmdline()[0].startswith(f"ray::{actor}")]
        found.kill()


@pytest.fixture
def world(tmp_path: Path, policy: Path) -> Iterator[World]:
    relay = Relay()
    settings = Settings(data_dir=tmp_path / "data", port=relay.port, runner_args=("-c", RUNNER), stop_grace_s=10)
    settings.data.runs.mkdir(parents=True)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), "127.0.0.1", 0, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started, "the server")
    relay.target = server.servers[0].sockets[0].getsockname()[1]
    world = World(relay, settings, Database(settings.resolved_database_url), policy)
    yield world
    kill_marked(world.run_id or "none")
    server.should_exit = True
    thread.join()
    relay.close()
    world.db.close()


def check_record(world: World, steps: int, redone: set[int]) -> None:
    """Everything that was reported is stored once, every step trained the tasks that it would have without the fault, and of what was
    played in vain nothing but the trials themselves is left."""
    with world.db.read() as session:
        for source in ("trainer", "runner"):
            seqs = session.scalars(sa.select(EventRow.seq).where(EventRow.source == source).order_by(EventRow.seq)).all()
            assert list(seqs) == list(range(1, world.spooled(source, "\n") + 1))
        assert session.scalars(sa.select(EventRow.problem).where(EventRow.problem.is_not(None))).all() == []
        assert session.scalars(sa.select(StepDone.step).order_by(StepDone.step)).all() == list(range(1, steps + 1))
        groups = session.scalars(sa.select(Group).order_by(Group.time)).all()
        trained = [group for group in groups if group.phase is Phase.TRAIN]
        assert [group.task for group in trained] == order_of_the_data(steps * PER_STEP)
        assert [group.step for group in trained] == [step for step in range(1, steps + 1) for _ in range(PER_STEP)]
        lost = {(group.step, group.task) for group in groups if group.phase is Phase.SUPERSEDED}
        assert {step for step, _ in lost} == redone and lost <= {(group.step, group.task) for group in trained}, "the same data again"

        trials = {trial.trial_id: trial for trial in session.scalars(sa.select(Trial))}
        assert all(trial.kind for trial in trials.values()), "every trial has its outcome"
        played = Counter(trial.group_id for trial in trials.values())
        assert all(played[group.group_id] == group.size for group in groups if group.phase is not Phase.SUPERSEDED)
        final = {group.group_id for group in trained}
        assert all(trial.kind == TrialState.SCORED for trial in trials.values() if trial.group_id in final)
        sampled = session.scalar(
            sa.select(sa.func.sum(CaptureRow.sampled_tokens)).where(
                CaptureRow.trial_id.in_([name for name, trial in trials.items() if trial.group_id in final])
            )
        )
        metrics = sa.select(sa.func.sum(Metric.value), sa.func.count()).where(Metric.key == "lego/sampled_tokens")
        assert session.execute(metrics).one() == (sampled, steps), "what was played is trained once"


def order_of_the_data(tasks: int) -> list[str]:
    """As torch draws it for the seed of the run, without a trainer."""
    drawn = RandomSampler(range(TASKS), generator=torch.Generator().manual_seed(0))
    return [f"train-{number}" for number in drawn][:tasks]


def test_killed_processes_of_a_trainer_cost_the_step_under_way(world: World) -> None:
    """The one that generates in step 1, when there is no checkpoint yet; in the second the one that trains; in the third all of them."""
    world.start(3, held=1, schedule="async")
    world.in_the_middle_of(1)
    world.kill("CpuRolloutWorker")
    world.hold(2)
    world.has_steps(1)
    world.in_the_middle_of(2, "r2")
    world.kill("WorkerDict")
    world.hold(3)
    world.has_steps(2)
    world.in_the_middle_of(3, "r3")
    for process in (trainer := world.trainer(), *trainer.children(recursive=True)):
        process.kill()
    world.hold(99)
    world.ends()
    check_record(world, 3, redone={1, 2, 3})  # the third was begun ahead
    with world.db.read() as session:
        titles = session.scalars(sa.select(FindingRow.title).order_by(FindingRow.time)).all()
    goes_on = "The trainer died and goes on from the checkpoint after step"
    assert titles == [
        f"{goes_on} 0 (start 2): EngineGone: generation failed: the process of the engine died. {PERHAPS}",
        f"{goes_on} 1 (start 3): ActorDiedError: a process of the trainer died. {PERHAPS}",
        f"{goes_on} 2 (start 4): it was killed. {PERHAPS}",
    ]


def test_a_cut_network_loses_and_doubles_nothing(world: World) -> None:
    """Silent for longer than a step, then with resets, then silent for good. Training goes on as if nothing were."""
    world.start(6, held=2)
    world.in_the_middle_of(2)
    world.has_steps(1)
    scraped = world.scrape()
    assert scraped["lego_rl_proxy_sessions_open"] == PER_STEP * SIZE and scraped["lego_rl_proxy_tokens_total"] > 0
    for how, done in (("silent", 1), ("reset", 3)):
        world.relay.cut(how)
        world.hold(done + 3)
        world.in_the_middle_of(done + 3)
        assert world.steps() == done
        until(lambda: world.state()[0] is RunState.STALLED, "the server's notice")
        assert "the network between the trainer and this server may be cut" in world.state()[1]
        world.relay.heal()
        world.has_steps(done + 2)
        assert world.state()[0] in (RunState.RUNNING, RunState.STALLED)
    world.relay.cut("silent")
    world.hold(99)
    world.ends()
    check_record(world, 6, redone=set())
