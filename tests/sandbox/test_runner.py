"""The runner's HTTP interface, over real HTTP, with trials in real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from sandbox.runner.app import create_app
from sandbox.runner.drive import Room
from sandbox.runner.trials import Trials
from server.schemas.events import Event
from server.schemas.outcome import Stage
from server.schemas.spool import Reporter
from server.schemas.states import TrialState
from server.schemas.tasks import TRAIN
from server.schemas.trials import TrialView

from .support import needs_sandbox, script_room, solution, spec

pytestmark = needs_sandbox

TOKEN = "token-of-the-runner"


@contextlib.asynccontextmanager
async def service(room: Room) -> AsyncIterator[tuple[httpx.AsyncClient, Path]]:
    root = room.trials.parent
    reporter = Reporter("http://127.0.0.1:9", "run", "x", "runner", root / "spool")
    trials = Trials(room, root, reporter)
    server = uvicorn.Server(uvicorn.Config(create_app(trials, TOKEN, "boot-1", "cgroup"), log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60, trust_env=False) as client:
            yield client, root / "spool" / "runner.jsonl"
        server.should_exit = True
        await serving
    await trials.cancel_all()
    await asyncio.to_thread(reporter.close, 0)


def served(body: Callable[[Room, httpx.AsyncClient, Path], Awaitable[None]], concurrency: int = 8) -> None:
    async def main() -> None:
        run_spec = spec(sandbox={"concurrency": concurrency})
        async with script_room(run_spec) as room, service(room) as (client, spool):
            await body(room, client, spool)

    asyncio.run(main())


def body_of(room: Room, trial_id: str, harness: str = "script", number: int = 0) -> dict[str, object]:
    proxy = {"url": "http://127.0.0.1:9/rollout/x", "key": "k" * 40}
    return {"trial_id": trial_id, "task": room.index[TRAIN][number], "harness": harness, "proxy": proxy}


def script(room: Room, text: str) -> None:
    room.launchers["script"].script = text


async def finished(client: httpx.AsyncClient, trial_id: str) -> TrialView:
    while True:
        answer = await client.get(f"/trials/{trial_id}", params={"wait": 20})
        view = TrialView.model_validate_json(answer.raise_for_status().content)
        if view.outcome is not None:
            return view


def test_a_trial_from_request_to_outcome() -> None:
    async def body(room: Room, client: httpx.AsyncClient, spool: Path) -> None:
        script(room, solution(room))
        answer = await client.post("/trials", json=body_of(room, "t1"))
        assert answer.status_code == 202 and answer.json()["state"] == "queued"
        view = await finished(client, "t1")
        assert view.state is TrialState.SCORED and view.stage is Stage.DONE and view.exit_code == 0
        assert view.outcome is not None and view.outcome.model_dump()["reward"] == 1
        stages = [timing.stage for timing in view.timings]
        assert stages == [Stage.SANDBOX_SETUP, Stage.AGENT_SETUP, Stage.AGENT, Stage.COLLECT, Stage.VERIFIER]
        assert all(timing.finished is not None and timing.finished >= timing.started for timing in view.timings)
        assert {"verifier/verdict.json", "diff"} <= {artifact.name for artifact in view.artifacts}
        assert all((room.trials.parent / artifact.path).stat().st_size == artifact.size for artifact in view.artifacts)

        events = [Event.model_validate_json(line).body for line in spool.read_text().splitlines()]
        assert [event.stage for event in events if event.type == "trial"] == [*stages, Stage.DONE]
        assert [event.stage for event in events if event.type == "stage_timing"] == stages
        (archived,) = [event for event in events if event.type == "archive"]
        diff = (room.trials.parent / archived.path).read_bytes()
        assert (archived.trial_id, archived.size, archived.sha256) == ("t1", len(diff), hashlib.sha256(diff).hexdigest())
        assert b"check.py" not in diff and b"solve.sh" not in diff

    served(body)


def test_a_scrape_counts_trials_and_the_seconds_of_their_stages() -> None:
    async def body(room: Room, client: httpx.AsyncClient, spool: Path) -> None:
        for name in ("t1", "t1", "t2"):
            await client.post("/trials", json=body_of(room, name, "noop"))
        for name in ("t1", "t2"):
            assert (await finished(client, name)).state is TrialState.SCORED
        assert (await client.get("/metrics", headers={"authorization": "Bearer another"})).status_code == 401
        families = {family.name: family for family in text_string_to_metric_families((await client.get("/metrics")).text)}
        ended = {
            (s.labels["state"], s.labels["cause"]): s.value for s in families["lego_rl_runner_trials"].samples if s.name.endswith("_total")
        }
        live = {sample.labels["state"]: sample.value for sample in families["lego_rl_runner_trials_live"].samples}
        stages = {s.labels["stage"]: s.value for s in families["lego_rl_runner_stage_seconds"].samples if s.name.endswith("_count")}
        assert ended == {("scored", ""): 2} and live == {"queued": 0, "running": 0}
        assert stages == dict.fromkeys(("sandbox_setup", "agent_setup", "agent", "collect", "verifier"), 2)

    served(body)


def test_the_same_request_twice_is_one_trial_and_another_is_a_conflict() -> None:
    async def body(room: Room, client: httpx.AsyncClient, spool: Path) -> None:
        asked = body_of(room, "t1", "noop")
        first, second = [await client.post("/trials", json=asked) for _ in range(2)]
        assert first.status_code == second.status_code == 202
        assert (await client.post("/trials", json=body_of(room, "t1", "oracle"))).status_code == 409
        await finished(client, "t1")
        assert (await client.post("/trials", json=asked)).json()["state"] == "scored"
        assert len(list(room.trials.iterdir())) == 1

    served(body)


def test_what_is_refused() -> None:
    async def body(room: Room, client: httpx.AsyncClient, spool: Path) -> None:
        asked = body_of(room, "t1", "noop")
        assert (await client.get("/trials/none")).status_code == 404
        assert (await client.delete("/trials/none")).status_code == 404
        for wrong in ({"task": "none"}, {"task": "../x"}, {"harness": "none"}, {"split": "none"}, {"trial_id": "../../etc"}, {"more": 1}):
            assert (await client.post("/trials", json=asked | wrong)).status_code == 422, wrong
        for method, path in (("GET", "/healthz"), ("GET", "/trials/t1"), ("POST", "/trials"), ("DELETE", "/trials/t1")):
            for headers in ({"authorization": ""}, {"authorization": "Bearer other"}):
                assert (await client.request(method, path, headers=headers)).status_code == 401

    served(body)


def test_concurrency_is_bounded_and_queued_trials_can_be_cancelled() -> None:
    """Report 36: hundreds of sessions that start at once broke each other; here they wait their turn."""

    async def body(room: Room, client: httpx.AsyncClient, spool: Path) -> None:
        script(room, "sleep 60")
        for trial_id in ("t1", "t2", "t3"):
            await client.post("/trials", json=body_of(room, trial_id))
        while (await client.get("/trials/t1")).json()["stage"] != "agent":
            await asyncio.sleep(0.05)
        states = [(await client.get(f"/trials/{trial_id}")).json()["state"] for trial_id in ("t1", "t2", "t3")]
        assert states == ["running", "queued", "queued"]
        assert (await client.get("/healthz")).json() == {"boot": "boot-1", "live": 3, "limits": "cgroup"}
        for trial_id in ("t3", "t1"):
            assert (await client.delete(f"/trials/{trial_id}")).status_code == 202
            view = await finished(client, trial_id)
            assert view.state is TrialState.FAILED
            assert json.loads(view.outcome.model_dump_json())["cause"] == "cancelled"  # type: ignore[union-attr]
        while (await client.get("/trials/t2")).json()["stage"] != "agent":
            await asyncio.sleep(0.05)

    served(body, concurrency=1)


def test_a_poll_returns_after_its_wait() -> None:
    async def body(room: Room, client: httpx.AsyncClient, spool: Path) -> None:
        script(room, "sleep 60")
        await client.post("/trials", json=body_of(room, "t1"))
        answer = await client.get("/trials/t1", params={"wait": 0.2})
        assert answer.json()["state"] in ("queued", "running")

    served(body)
