from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.states import TrialState
from server.schemas.trials import ProxyEndpoint, TrialRequest, TrialView
from tests.trainer.support.fake_runner import FakeRunner, Harness, scored
from trainer.rollout.runner_client import RunnerClient, RunnerRefused

pytestmark = pytest.mark.anyio


def request(trial_id: str = "s001-t-0") -> TrialRequest:
    return TrialRequest(trial_id=trial_id, task="t", harness="h", proxy=ProxyEndpoint(url="http://127.0.0.1:1", key=SecretStr("k")))


async def solves(harness: Harness, trial: TrialRequest) -> Scored:
    return scored(1)


async def never_ends(harness: Harness, trial: TrialRequest) -> Scored:
    await asyncio.sleep(3600)
    return scored(1)


@pytest.fixture
def runner_file(tmp_path: Path) -> Path:
    return tmp_path / "runner.json"


@pytest.fixture
def runner(runner_file: Path) -> Iterator[FakeRunner]:
    runner = FakeRunner(runner_file, "token", solves)
    runner.start()
    yield runner
    runner.stop()


async def submitted(runner: FakeRunner) -> None:
    while not runner.requests:  # noqa: ASYNC110 the runner lives in another thread
        await asyncio.sleep(0.01)


async def test_a_trial_is_submitted_once_and_its_end_awaited(runner: FakeRunner, runner_file: Path) -> None:
    client = RunnerClient(runner_file, "token")
    view = await client.run(request())
    assert isinstance(view, TrialView) and view.state is TrialState.SCORED and view.outcome == scored(1)
    assert [sent.proxy.key.get_secret_value() for sent in runner.requests] == ["k"]
    assert (await client.health()).boot == runner.boot
    await client.close()


async def test_a_busy_runner_is_asked_again(runner: FakeRunner, runner_file: Path) -> None:
    runner.fail_next = [503, 500]
    client = RunnerClient(runner_file, "token")
    assert isinstance(await client.run(request()), TrialView)
    await client.close()


async def test_a_refused_request_is_no_trial_outcome(runner: FakeRunner, runner_file: Path) -> None:
    client = RunnerClient(runner_file, "wrong")
    with pytest.raises(RunnerRefused, match="HTTP 401"):
        await client.run(request())
    await client.close()


@pytest.mark.parametrize("removed", [False, True], ids=["stale file", "no file"])
async def test_a_restarted_runner_loses_its_trials_and_takes_new_ones(runner: FakeRunner, runner_file: Path, removed: bool) -> None:
    runner.play = never_ends
    client = RunnerClient(runner_file, "token")
    running = asyncio.create_task(client.run(request()))
    await submitted(runner)
    await asyncio.to_thread(runner.stop)
    if removed:  # as the supervisor does before it starts the next one
        runner_file.unlink()
    successor = FakeRunner(runner_file, "token", solves)
    successor.start()
    lost = await running
    assert isinstance(lost, Failed) and lost.cause is Cause.RUNNER_LOST
    assert successor.requests == []
    assert isinstance(await client.run(request("s001-t-1")), TrialView)
    await client.close()
    await asyncio.to_thread(successor.stop)
    runner.start()  # for the fixture to stop


@pytest.mark.parametrize("removed", [False, True], ids=["stale file", "no file"])
async def test_a_runner_that_is_not_up_yet_gets_the_trial_when_it_is(runner: FakeRunner, runner_file: Path, removed: bool) -> None:
    await asyncio.to_thread(runner.stop)
    if removed:  # as the supervisor does before it starts the next one
        runner_file.unlink()
    client = RunnerClient(runner_file, "token")
    waiting = asyncio.create_task(client.run(request()))
    await asyncio.sleep(0.1)
    successor = FakeRunner(runner_file, "token", solves)
    successor.start()
    assert isinstance(await waiting, TrialView)
    await client.close()
    await asyncio.to_thread(successor.stop)
    runner.start()


@pytest.mark.parametrize("removed", [False, True], ids=["stale file", "no file"])
async def test_a_runner_that_stays_away_fails_the_trial_where_it_was(runner: FakeRunner, runner_file: Path, removed: bool) -> None:
    await asyncio.to_thread(runner.stop)
    if removed:  # as the supervisor does before it starts the next one
        runner_file.unlink()
    client = RunnerClient(runner_file, "token", grace_s=0.3)
    lost = await client.run(request())
    assert isinstance(lost, Failed) and lost.cause is Cause.RUNNER_LOST and lost.stage is Stage.QUEUED
    assert "did not answer for" in lost.detail
    await client.close()
    runner.start()


async def test_cancelling_cancels_the_trial_at_the_runner(runner: FakeRunner, runner_file: Path) -> None:
    runner.play = never_ends
    client = RunnerClient(runner_file, "token")
    running = asyncio.create_task(client.run(request()))
    await submitted(runner)  # its answer may be still on the way
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert runner.cancelled == ["s001-t-0"]
    await client.close()
