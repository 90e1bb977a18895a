"""Whole runs through the CLI and the MCP tools, on a real control plane whose trainer takes a second."""

import sys
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from mcp import Client as McpClient
from mcp.client.stdio import StdioServerParameters, stdio_client

from plugin.client import Client
from plugin.demo import significant, summarise
from plugin.follow import follow
from server.schemas.datadir import DataDir
from server.schemas.states import RunState
from tests.support.quick_server import quick_server

from .test_cli import rl

SMALL = {"trainer.steps": 2, "trainer.evaluation.rollouts": 96, "rollout.tasks_per_step": 2, "rollout.group_size": 4}
SET = [argument for field, value in SMALL.items() for argument in ("--set", f"{field}={value}")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDir:
    return DataDir(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def control(data: DataDir) -> Iterator[Client]:
    with quick_server(data) as client:
        yield client


@pytest.fixture(scope="module")
def followed(control: Client, data: DataDir) -> tuple[str, str]:
    """(run id, what the terminal showed) of `rl run --yes --follow`."""
    result = rl(data, "run", "--yes", "--follow", *SET)
    assert result.returncode == 0, result.stdout + result.stderr
    return control.latest().run_id, result.stdout


def test_following_prints_each_step_and_evaluation_once(followed: tuple[str, str]) -> None:
    run_id, shown = followed
    lines = shown.splitlines()
    assert sum(line.startswith("step   1/2  train reward 0.50 ▅") for line in lines) == 1
    assert sum(line.startswith("step   2/2  train reward 0.50 ▅▅") for line in lines) == 1
    assert sum(line.startswith("held-out after step 0: 0.250 of 96 solved") for line in lines) == 1
    assert sum(line.startswith("held-out after step 2: 0.750 of 96 solved") for line in lines) == 1
    assert f"{run_id} is succeeded" in lines


def test_following_waits_for_a_server_that_went_away(followed: tuple[str, str], control: Client, data: DataDir) -> None:
    run_id, _ = followed
    places = iter([Client("http://127.0.0.1:9", "gone"), Client.of(data)])
    lines: list[str] = []
    assert follow(lambda: next(places), run_id, say=lines.append, say_now=lines.append).state is RunState.SUCCEEDED
    assert lines[0].startswith("the server is away")
    assert lines[1] == f"{run_id} is succeeded"


def test_status_of_one_run_and_of_all(followed: tuple[str, str], data: DataDir) -> None:
    run_id, _ = followed
    assert rl(data, "status").stdout.startswith(f"{run_id}  succeeded  2/2 steps, 208 trials")
    one = rl(data, "status", run_id)
    assert one.returncode == 0
    assert "completed 208" in one.stdout


def test_the_demo_reads_its_figures_from_the_record(followed: tuple[str, str], control: Client) -> None:
    run_id, _ = followed
    result = summarise(control.run(run_id), control.steps(run_id), control.trials(run_id))
    assert (result["trials"], result["sampled_tokens"], result["pearson"]) == (208, 200, 0.9995)
    assert 0 < result["startup_s"] < result["wall_s"]
    assert significant(result)


@pytest.mark.parametrize("page", [1000, 208, 104, 50])
def test_all_trials_come_whatever_the_page(followed: tuple[str, str], control: Client, page: int) -> None:
    run_id, _ = followed
    assert len({trial.trial_id for trial in control.trials(run_id, page)}) == 208


def test_diagnosing_names_the_run(followed: tuple[str, str], data: DataDir) -> None:
    assert rl(data, "diagnose").returncode == 0


def test_stopping_a_finished_run_changes_nothing(followed: tuple[str, str], data: DataDir, control: Client) -> None:
    run_id, _ = followed
    rl(data, "stop", run_id)
    assert control.run(run_id).state is RunState.SUCCEEDED


def test_the_tools_start_and_follow_a_run(control: Client, data: DataDir) -> None:
    """A client that shows no forms: `confirm` carries the person's answer."""
    heard: list[str | None] = []

    async def progress(_: float, __: float | None, message: str | None) -> None:
        heard.append(message)

    async def call(mcp: McpClient, tool: str, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
        result = await mcp.call_tool(tool, arguments, **options)
        assert not result.is_error, result
        return result.structured_content or {}

    async def main() -> None:
        command = StdioServerParameters(command=sys.executable, args=["-P", "-m", "plugin.mcp_server", "--data-dir", str(data.root)])
        async with McpClient(stdio_client(command)) as mcp:
            plan = await call(mcp, "plan_run", {"overrides": SMALL})
            started = await call(mcp, "start_run", {"digest": plan["digest"], "confirm": True})
            assert started["dashboard"] == f"{control.url}/runs/{started['run_id']}"
            status = await call(mcp, "run_status", {"run": started["run_id"], "wait_s": 9}, progress_callback=progress)
            while not status["finished"]:
                status = await call(mcp, "run_status", {"run": started["run_id"], "wait_s": 9}, progress_callback=progress)
            assert (status["state"], status["steps_done"], status["trials"]) == ("succeeded", 2, 208)
            assert [point["solve_rate"] for point in status["held_out"]] == [0.25, 0.75]
            found = await call(mcp, "diagnose_run", {})
            assert found["run_id"] == started["run_id"]
            assert found["checked"]

    anyio.run(main)
    assert heard, "waiting reports progress"
