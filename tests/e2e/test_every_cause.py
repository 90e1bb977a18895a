"""A planted fault of every cause in the taxonomy, from the fault itself to the page that shows it.

Each is played by the trainer's own half against the real proxy and a real runner with real sandboxes, in a group with one honest solution.
It must give exactly its cause, be tried again as the admission table says, stay out of the group's statistics, and be shown with a hint.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import override

import httpx
import pytest
from fastapi.testclient import TestClient

from plugin import show
from sandbox.environments.backend import Backend
from sandbox.environments.namespace.host import Host
from sandbox.harnesses.base import HarnessAgent
from sandbox.harnesses.warm import WarmStartError, interpreter
from sandbox.integrity.environment import TrialEnvironment
from sandbox.runner.drive import Room
from sandbox.tasks.lean import lean_twin
from server.app import create_app
from server.db import Database
from server.db.models import PlanRow, Run
from server.events import ingest
from server.launchers.supervisor import record
from server.schemas.api import RunStatus
from server.schemas.events import GroupBody, RunStateBody
from server.schemas.hints import HINTS
from server.schemas.outcome import ADMISSION, Cause, Failed, Fault
from server.schemas.rundir import RunDir, RunnerFile, write_atomic
from server.schemas.spool import Reporter, read_spool
from server.schemas.states import Phase, RunState
from server.schemas.tasks import TRAIN
from server.settings import Settings
from tests.sandbox.support import needs_sandbox, script_room, solution, spec
from tests.sandbox.test_runner import TOKEN, service
from tests.trainer.scripted import ScriptedEngine, say
from trainer.engine.base import EngineError
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy
from trainer.rollout.groups import Group
from trainer.rollout.runner_client import RunnerClient
from trainer.rollout.trial import Rollout, TrialRoom
from trainer.vocabulary import byte_level

pytestmark = [needs_sandbox, pytest.mark.slow]

CALL = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
try:
    urllib.request.urlopen(urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers)).read()
except OSError as error:
    print(error)
"""


class Caller(HarnessAgent):
    """Makes one model call, then runs the launcher's script."""

    @staticmethod
    @override
    def name() -> str:
        return "script"

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        self.rollout.on_start()
        env = {"URL": self.api_url(environment, "/v1"), "KEY": self.rollout.proxy.key.get_secret_value()}
        await environment.sandbox.exec([interpreter(), "-c", CALL], env=env)
        self.exit_code = (await environment.sandbox.exec(["/bin/bash", "-s"], stdin=self.rollout.launcher.script.encode())).return_code


class NeverCalls(Caller):
    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        self.rollout.on_start()
        self.exit_code = 0


class NoWarmParent(Caller):
    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        raise WarmStartError("the warm parent died")


@dataclass
class World:
    room: Room
    engine: ScriptedEngine
    rendering: Rendering
    http: httpx.AsyncClient
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def task(self) -> Path:
        return self.room.tasks / TRAIN / self.room.index[TRAIN][0]

    def script(self, text: str) -> None:
        self.room.launchers["script"].script = text

    async def in_agent(self, then: Callable[[], Awaitable[object]]) -> None:
        """`then`, as soon as the second trial's agent runs."""
        while True:
            answer = await self.http.get("/trials/s001-t-1")
            if answer.is_success and answer.json()["stage"] == "agent":
                break
            await asyncio.sleep(0.02)
        await then()


async def no_image(world: World) -> None:
    config = world.task / "task.toml"
    config.write_text(config.read_text().replace("[environment]\n", '[environment]\ndocker_image = "nowhere.invalid/none:1"\n'))


async def no_such_place(world: World) -> None:
    config = world.task / "task.toml"
    config.write_text(config.read_text().replace('workdir = "/workspace"', 'workdir = "/bin/workspace"'))
    shutil.rmtree(lean_twin(world.task))  # it was made of the task as it was


async def no_warm_parent(world: World) -> None:
    world.room.agents["script"] = NoWarmParent


async def time_is_up(world: World) -> None:
    world.script("sleep 60")


async def never_calls(world: World) -> None:
    world.room.agents["script"] = NeverCalls


async def spawner_killed(world: World) -> None:
    world.script("sleep 60")
    host = Backend.running(world.room.sandboxes)
    assert isinstance(host, Host)

    async def kill() -> None:
        os.kill(host.pid, signal.SIGKILL)

    world.tasks.append(asyncio.create_task(world.in_agent(kill)))


async def proxy_bug(world: World) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    world.rendering.render = broken  # type: ignore[assignment,method-assign]


async def engine_down(world: World) -> None:
    world.engine.write = None
    world.engine.script = [EngineError("out of memory on the device")] * 9


async def check_vanished(world: World) -> None:
    (world.task / "tests" / "check.py").unlink()


async def check_hangs(world: World) -> None:
    world.script("true")
    (world.task / "tests" / "check.py").write_text("import signal, time\nsignal.alarm(0)\ntime.sleep(60)\n")


async def cancelled(world: World) -> None:
    world.script("sleep 60")
    world.tasks.append(asyncio.create_task(world.in_agent(lambda: world.http.delete("/trials/s001-t-1"))))


PLANTS: dict[Cause, Callable[[World], Awaitable[None]]] = {
    Cause.IMAGE: no_image,
    Cause.SANDBOX_SETUP: no_such_place,
    Cause.AGENT_SETUP: no_warm_parent,
    Cause.AGENT_TIMEOUT: time_is_up,
    Cause.HARNESS_NEVER_CALLED: never_calls,
    Cause.RUNNER_LOST: spawner_killed,
    Cause.PROXY: proxy_bug,
    Cause.ENGINE: engine_down,
    Cause.VERIFIER: check_vanished,
    Cause.VERIFIER_TIMEOUT: check_hangs,
    Cause.CANCELLED: cancelled,
}
SPEC = spec(
    model={"path": "m", "context": 4000},
    rollout={"max_turns": 4, "max_new_tokens": 16},
    sandbox={"concurrency": 4, "budgets": {"agent_s": 8, "verifier_s": 30}},
)


async def played(plant: Callable[[World], Awaitable[None]], root: Path) -> tuple[Rollout, Rollout, int]:
    """An honest trial, then one with the fault planted, in one group; with them, how many attempts the faulty one had."""
    run = RunDir(root)
    run.captures.mkdir()
    tokenizer = byte_level()
    engine, rendering = ScriptedEngine(tokenizer, write=lambda: say("hm")), Rendering(tokenizer)
    proxy, reporter = Proxy(engine, rendering), Reporter("http://127.0.0.1:9", "r1", "t", "trainer", run.spool)
    await proxy.start()
    async with script_room(SPEC) as room, service(room) as (http, spool):
        room.agents["script"] = Caller
        write_atomic(run.runner_file, RunnerFile(url=str(http.base_url).rstrip("/"), pid=0, boot="boot-1").model_dump_json())
        client = RunnerClient(run.runner_file, TOKEN)
        trainer = TrialRoom(run, SPEC, proxy, client, reporter, rendering.stop_token_ids)
        group = Group("s001-t", 1, Phase.TRAIN, room.index[TRAIN][0], "script", 2, "u")
        reporter.report(RunStateBody(state=RunState.RUNNING))
        reporter.report(GroupBody(group_id="s001-t", step=1, phase=Phase.TRAIN, task=group.task, harness="script", size=2))
        world = World(room, engine, rendering, http)
        world.script(solution(room))
        honest = await trainer.play(group, 0)
        await plant(world)
        faulty = await trainer.play(group, 1)
        await client.close()
        attempts = len({path.name.partition(".")[2] for path in room.trials.glob("s001-t-1*")} | {""})
        (run.spool / "runner.jsonl").write_bytes(spool.read_bytes())
    await proxy.stop()
    reporter.close(0)
    return honest, faulty, attempts


def server(run: RunDir) -> TestClient:
    """A server whose record holds what both sides reported."""
    settings = Settings(data_dir=run.root / "data")
    db = Database(settings.resolved_database_url)
    settings.data.root.mkdir()
    db.migrate()
    now = time.time()
    with db.write() as session:
        session.add(PlanRow(digest="d", spec=SPEC.model_dump(mode="json"), provenance={}, summary="", created=now))
        session.flush()
        session.add(Run(run_id="r1", name="r", digest="d", state=RunState.STARTING, token_sha256="", steps_expected=1, created=now))
    for source in ("trainer", "runner"):
        ingest(db, "r1", read_spool(run.spool / f"{source}.jsonl"))
    db.close()
    (settings.data.runs / "r1").mkdir(parents=True)
    record(RunDir(settings.data.runs / "r1"), os.getpid(), "supervisor")
    return TestClient(create_app(settings), base_url="http://127.0.0.1")


@pytest.mark.parametrize("cause", list(Cause))
def test_a_planted_fault_gives_its_cause_counts_for_nothing_and_is_shown_with_a_hint(cause: Cause, tmp_path: Path) -> None:
    assert cause in PLANTS, f"plant a fault that gives {cause}"
    honest, faulty, attempts = asyncio.run(played(PLANTS[cause], tmp_path))
    assert honest.reward == 1, honest.outcome

    assert isinstance(faulty.outcome, Failed), faulty.outcome
    assert faulty.outcome.cause is cause, faulty.outcome
    assert faulty.reward is None and faulty.samples == []
    row = ADMISSION[cause]
    assert not row.trained and row.fault is not Fault.POLICY
    assert attempts == row.retries + 1

    with server(RunDir(tmp_path)) as client:
        series = client.get("/runs/r1/series.json").json()
        assert (series["reward"], series["solved"], series["unsolved"]) == ([1.0], [1], [0])
        status = RunStatus.model_validate_json(client.get("/api/runs/r1").content)
        assert status.train_reward[0].n == 1 and status.outcomes[cause] >= 1
        assert f"  {cause}: look at {HINTS[cause]}" in list(show.status(status))
        assert HINTS[cause].partition("`")[0] in client.get(f"/runs/r1/trials/{faulty.trial_id}").text.replace("&#39;", "'")
        assert json.loads(client.get(f"/api/runs/r1/trials/{faulty.trial_id}").content)["outcome"]["cause"] == cause


def test_every_cause_has_a_hint() -> None:
    assert HINTS.keys() == set(Cause)
