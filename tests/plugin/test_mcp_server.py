"""The MCP server over real stdio, with the official client."""

import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client as McpClient
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, ElicitRequestParams, ElicitResult

from plugin.client import Client
from plugin.local import stop_server
from server.schemas.datadir import DataDir

Use = Callable[[McpClient], Awaitable[None]]


def with_server(data: DataDir, use: Use, cwd: Path | None = None, **options: Any) -> None:
    """Start the server as Claude Code does, and hand the connected client to `use`."""
    command = StdioServerParameters(command=sys.executable, args=["-P", "-m", "plugin.mcp_server", "--data-dir", str(data.root)], cwd=cwd)

    async def main() -> None:
        async with McpClient(stdio_client(command), **options) as mcp:
            await use(mcp)

    anyio.run(main)


def words(result: CallToolResult) -> str:
    return result.content[0].text  # type: ignore[union-attr]


def test_every_tool_says_what_it_does_to_the_world(empty: DataDir) -> None:
    async def use(mcp: McpClient) -> None:
        tools = {tool.name: tool for tool in (await mcp.list_tools()).tools}
        assert all(t.title and t.description and t.output_schema and t.annotations for t in tools.values())
        hints = {name: (t.annotations.read_only_hint, t.annotations.destructive_hint) for name, t in tools.items() if t.annotations}
        assert hints == {
            "check": (True, False),
            "check_status": (True, False),
            "plan_run": (True, False),
            "start_run": (False, True),
            "run_status": (True, False),
            "list_runs": (True, False),
            "diagnose_run": (True, False),
            "review_finding": (False, False),
            "stop_run": (False, True),
            "dashboard_url": (True, False),
        }
        assert "answer" not in tools["start_run"].input_schema["properties"], "the person's answer does not come from the model"

    with_server(empty, use)


def test_reading_without_a_control_plane_says_how_to_start_one(empty: DataDir) -> None:
    async def use(mcp: McpClient) -> None:
        result = await mcp.call_tool("list_runs", {})
        assert result.is_error
        assert words(result).endswith(f"no server is running on {empty.root}: run `rl up`")

    with_server(empty, use)
    assert not empty.root.exists()


def test_planning_starts_the_control_plane_and_says_so(empty: DataDir) -> None:
    async def use(mcp: McpClient) -> None:
        first = await mcp.call_tool("plan_run", {"overrides": {"trainer.steps": 3}})
        while first.is_error:  # a busy machine: the tool answers in time, the server is not there yet
            assert "still starting" in words(first)
            first = await mcp.call_tool("plan_run", {"overrides": {"trainer.steps": 3}})
        plan = first.structured_content
        assert plan is not None
        assert re.match(r"(\(Started the control plane at http://127.0.0.1:\d+\.\) )?Train ", plan["summary"])
        assert plan["settings"]["trainer.steps"] == "3 (override)"
        again = (await mcp.call_tool("plan_run", {"overrides": {"trainer.steps": 3}})).structured_content
        assert again is not None
        assert again["summary"].startswith("Train ")
        assert again["digest"] == plan["digest"]

    with_server(empty, use)
    stop_server(empty)


def test_a_spec_file_is_found_from_the_project(client: Client, data: DataDir, tmp_path: Path) -> None:
    """The project may hold a package named like one of ours."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise RuntimeError('not yours')")
    (tmp_path / "run.yaml").write_text("extends: local\ntrainer: {steps: 5, stepz: 1}\n")

    async def use(mcp: McpClient) -> None:
        result = await mcp.call_tool("plan_run", {"spec": "run.yaml"})
        assert result.is_error
        assert "unknown key `trainer.stepz`" in words(result)
        assert "did you mean `steps`" in words(result)
        assert "\n" not in words(result)

    with_server(data, use, cwd=tmp_path)


def test_nothing_starts_unconfirmed(client: Client, data: DataDir) -> None:
    async def use(mcp: McpClient) -> None:
        plan = (await mcp.call_tool("plan_run", {})).structured_content
        assert plan is not None
        result = await mcp.call_tool("start_run", {"digest": plan["digest"]})
        assert result.is_error
        assert "not started: show the plan" in words(result)

    with_server(data, use)
    assert client.runs() == []


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ElicitResult(action="decline"), "the person declined"),
        (ElicitResult(action="accept", content={"start": False}), "the person declined"),
        (ElicitResult(action="cancel"), "dismissed without an answer"),
    ],
)
def test_a_client_that_can_ask_asks_with_the_plan(client: Client, data: DataDir, reply: ElicitResult, reason: str) -> None:
    questions: list[str] = []

    async def person(_: Any, question: ElicitRequestParams) -> ElicitResult:
        questions.append(question.message)
        return reply

    async def use(mcp: McpClient) -> None:
        plan = (await mcp.call_tool("plan_run", {})).structured_content
        assert plan is not None
        result = await mcp.call_tool("start_run", {"digest": plan["digest"], "confirm": True})
        assert result.is_error
        assert reason in words(result)
        assert questions == [f"{plan['summary']}\nStart this run?"]

    with_server(data, use, elicitation_callback=person)
    assert client.runs() == []


def test_a_plan_that_was_never_shown_cannot_start(client: Client, data: DataDir) -> None:
    async def use(mcp: McpClient) -> None:
        result = await mcp.call_tool("start_run", {"digest": "0" * 64, "confirm": True})
        assert result.is_error
        assert "no plan" in words(result)

    with_server(data, use)


@pytest.mark.parametrize(
    ("tool", "arguments", "answer"),
    [
        ("plan_run", {"steps": 3}, "plan_run has no argument 'steps': it takes spec, overrides"),
        ("list_runs", {"run": "x"}, "list_runs has no argument 'run': it takes none"),
        ("start_run", {}, "start_run: digest: Field required"),
        ("plan_run", {"overrides": "trainer.steps=3"}, "plan_run: overrides: Input should be a valid dictionary"),
        ("run_status", {"wait_s": 100}, "run_status: wait_s: Input should be less than or equal to 9"),
        ("no_such_tool", {}, "Unknown tool: no_such_tool"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(empty: DataDir, tool: str, arguments: dict[str, Any], answer: str) -> None:
    async def use(mcp: McpClient) -> None:
        result = await mcp.call_tool(tool, arguments)
        assert (result.is_error, words(result)) == (True, answer)

    with_server(empty, use)
    assert not empty.root.exists()
