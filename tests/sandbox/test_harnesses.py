"""The real harnesses in a real runner process, against a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from sandbox.bench.scripted import SUBMIT, scripted_model
from sandbox.harnesses.pins import CLAUDE_CODE, MINI_SWE_AGENT, Pin
from sandbox.harnesses.store import Store
from server.schemas.datadir import DataDir, default_data_dir
from server.schemas.rundir import RunDir, RunFile, RunnerFile, write_atomic
from server.schemas.runspec import RunSpec
from server.schemas.tasks import TRAIN, TaskEntry
from server.schemas.trials import TrialView

from .support import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow]

TOKEN = "token-of-the-runner"
PAUSE = "sleep 60"


def runtimes(pin: Pin) -> Path:
    """The user's own store: installing takes half a minute, once."""
    store = Store(DataDir(default_data_dir()).runtimes)
    store.install(pin)
    return store.root


class Runner:
    def __init__(self, run: RunDir, process: asyncio.subprocess.Process, client: httpx.AsyncClient, model: str) -> None:
        self.run, self.process, self._client, self._model = run, process, client, model
        self.tasks = [TaskEntry.model_validate_json(line) for line in (run.tasks / TRAIN / "index.jsonl").read_text().splitlines()]

    async def submit(self, harness: str, trial_id: str) -> str:
        task = self.tasks[0].task
        proxy = {"url": f"{self._model}/rollout/{trial_id}", "key": f"secret-of-{trial_id}-{'k' * 30}"}
        body = {"trial_id": trial_id, "task": task, "harness": harness, "proxy": proxy}
        (await self._client.post("/trials", json=body)).raise_for_status()
        return trial_id

    async def view(self, trial_id: str, wait: float = 20) -> TrialView:
        return TrialView.model_validate_json((await self._client.get(f"/trials/{trial_id}", params={"wait": wait})).content)

    async def trial(self, harness: str, trial_id: str) -> TrialView:
        await self.submit(harness, trial_id)
        while (view := await self.view(trial_id)).outcome is None:
            pass
        return view


def commands_of(run: RunDir) -> Callable[[str, int], str | None]:
    """By the trial's name: `solve…` repairs, `noop…` only looks, `hang…` never ends, `talk…` calls no tool at all."""

    def commands(rollout: str, turn: int) -> str | None:
        task = json.loads((run.tasks / TRAIN / "index.jsonl").read_text().splitlines()[0])["task"]
        repair = (run.tasks / TRAIN / task / "solution" / "solve.sh").read_text().splitlines()[-1]
        script = {"solve": ["ls", "cat *.py", repair, SUBMIT], "noop": ["ls", SUBMIT], "hang": ["ls", PAUSE, SUBMIT], "talk": []}
        chosen = script[rollout.split("-", maxsplit=1)[0]]
        return chosen[turn] if turn < len(chosen) else None

    return commands


@contextlib.asynccontextmanager
async def runner(pin: Pin, start: str) -> AsyncIterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="run-") as scratch:
        run = RunDir(Path(scratch))
        run_spec = RunSpec.model_validate(
            {
                "model": {"path": "builtin:none"},
                "harnesses": [{"name": pin.name, "version": pin.version, "start": start}],
                "data": {"family": "onebug", "train_tasks": 2, "held_out_tasks": 1},
            }
        )
        file = RunFile(
            run_id="r", server_url="http://127.0.0.1:9", event_token="e", runner_token=TOKEN, runtimes=runtimes(pin), spec=run_spec
        )
        write_atomic(run.run_file, file.model_dump_json())
        process = await launch(run)
        try:
            async with scripted_model(commands_of(run)) as model:
                url = RunnerFile.model_validate_json(run.runner_file.read_bytes()).url
                async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
                    yield Runner(run, process, client, model)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                assert not list((run.root / "sandboxes").iterdir())


async def launch(run: RunDir) -> asyncio.subprocess.Process:
    run.runner_file.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", "sandbox.runner", "--run-dir", str(run.root))
    while not run.runner_file.exists():
        assert process.returncode is None, "the runner did not start"
        await asyncio.sleep(0.05)
    return process


def with_runner(pin: Pin, start: str, body: Callable[[Runner], Awaitable[None]]) -> None:
    async def main() -> None:
        async with runner(pin, start) as room:
            await body(room)

    asyncio.run(main())


def reward(view: TrialView) -> int:
    assert view.outcome is not None and view.outcome.kind == "scored", view.outcome
    return view.outcome.reward


@pytest.mark.parametrize("start", ["warm_fork", "exec"])
def test_mini_swe_agent_solves_and_fails_by_what_the_model_says(start: str) -> None:
    async def body(room: Runner) -> None:
        solved, untouched = await asyncio.gather(room.trial(MINI_SWE_AGENT.name, "solve"), room.trial(MINI_SWE_AGENT.name, "noop"))
        assert (reward(solved), reward(untouched)) == (1, 0)
        trajectory = json.loads((room.run.trials / "solve" / "agent" / "trajectory.json").read_text())
        assert trajectory["info"]["exit_status"] == "Submitted"
        assert trajectory["info"]["mini_version"] == MINI_SWE_AGENT.version
        for trial in ("solve", "noop"):
            assert not any(b"secret-of-" in path.read_bytes() for path in (room.run.trials / trial).rglob("*") if path.is_file())

    with_runner(MINI_SWE_AGENT, start, body)


def test_a_model_that_calls_no_tool_ends_the_harness_and_is_graded() -> None:
    async def body(room: Runner) -> None:
        view = await room.trial(MINI_SWE_AGENT.name, "talk")
        assert reward(view) == 0
        trajectory = json.loads((room.run.trials / "talk" / "agent" / "trajectory.json").read_text())
        assert trajectory["info"]["exit_status"] == "RepeatedFormatError"

    with_runner(MINI_SWE_AGENT, "warm_fork", body)


def test_warm_rollouts_share_nothing_and_the_parent_knows_no_key() -> None:
    async def body(room: Runner) -> None:
        trials = [f"{kind}-{number}" for number in range(6) for kind in ("solve", "noop")]
        views = await asyncio.gather(*(room.trial(MINI_SWE_AGENT.name, trial) for trial in trials))
        assert [reward(view) for view in views] == [1, 0] * 6
        (parent,) = [child for child in psutil.Process(room.process.pid).children() if "mini_parent.py" in " ".join(child.cmdline())]
        assert parent.num_threads() == 1 and not parent.children()
        assert not any("secret-of-" in part for part in (*parent.cmdline(), *parent.environ().values()))

    with_runner(MINI_SWE_AGENT, "warm_fork", body)


def test_a_killed_runner_leaves_nothing_and_the_next_one_goes_on() -> None:
    async def body(room: Runner) -> None:
        await room.submit(MINI_SWE_AGENT.name, "hang")
        below: list[psutil.Process] = []
        while not any(PAUSE in " ".join(process.cmdline()) for process in below):
            await asyncio.sleep(0.05)
            below = [process for process in psutil.Process(room.process.pid).children(recursive=True) if process.is_running()]
        room.process.kill()
        await room.process.wait()
        _, alive = psutil.wait_procs(below, timeout=60)
        assert not alive
        room.process = await launch(room.run)
        assert len(list((room.run.root / "sandboxes").iterdir())) == 1
        room.process.send_signal(signal.SIGTERM)
        assert await room.process.wait() == 0
        assert not list((room.run.root / "sandboxes").iterdir())

    with_runner(MINI_SWE_AGENT, "warm_fork", body)


def test_a_dead_warm_parent_is_replaced_and_a_dead_spawner_ends_the_runner() -> None:
    async def body(room: Runner) -> None:
        children = {child: " ".join(child.cmdline()) for child in psutil.Process(room.process.pid).children()}
        (parent,) = [child for child, line in children.items() if "mini_parent.py" in line]
        (spawner,) = [child for child in children if child != parent]
        parent.kill()
        assert reward(await room.trial(MINI_SWE_AGENT.name, "solve")) == 1
        spawner.kill()
        assert await room.process.wait() == 1

    with_runner(MINI_SWE_AGENT, "warm_fork", body)


@pytest.mark.claude
def test_claude_code_solves_and_fails_by_what_the_model_says() -> None:
    async def body(room: Runner) -> None:
        solved, untouched = await asyncio.gather(room.trial(CLAUDE_CODE.name, "solve"), room.trial(CLAUDE_CODE.name, "noop"))
        assert (reward(solved), reward(untouched)) == (1, 0)
        events = [json.loads(line) for line in (room.run.trials / "solve" / "agent" / "stream.jsonl").read_text().splitlines()]
        (started,) = [event for event in events if event.get("subtype") == "init"]
        assert started["claude_code_version"] == CLAUDE_CODE.version
        assert events[-1]["type"] == "result" and not events[-1]["is_error"]

    with_runner(CLAUDE_CODE, "exec", body)
