"""The MCP server (stdio) behind `/rl:*`: `python -m plugin.mcp_server`. Every tool answers within 10 s with an id to ask again with."""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
from mcp.server.elicitation import AcceptedElicitation, CancelledElicitation, ElicitationResult
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field, ValidationError

from server.schemas.api import CheckRequest
from server.schemas.checks import Verdict
from server.schemas.datadir import DataDir, default_data_dir

from . import answers, show
from .client import Client
from .errors import ControlError
from .local import Up, ensure_server
from .spec import DEFAULT, spec_request

ANSWER_S = 9.0
"""Within this a tool has answered, whatever it waits for."""
START_S = 7.0
PROGRESS_S = 2.0
RUNS = 20


class Session:
    """What every tool call works with."""

    def __init__(self, data: DataDir) -> None:
        self.data = data

    @contextmanager
    def control(self, start: bool = False) -> Iterator[Up]:
        """The control plane for one tool call, started when it is absent and `start`; failures become one-line tool errors."""
        try:
            up = ensure_server(self.data, patience_s=START_S) if start else Up(Client.of(self.data), started=False)
            try:
                yield up
            finally:
                up.client.close()
        except ControlError as error:
            raise ToolError(str(error)) from None


Ctx = Context[Session, Any]
Spec = Annotated[str, Field(description="Name of a preset, or path of a YAML file that describes the run")]
Overrides = Annotated[dict[str, Any] | None, Field(description='RunSpec fields to set on top, by dotted name: {"trainer.steps": 12}')]
RunId = Annotated[str, Field(description="Run id; empty: the newest run")]
Wait = Annotated[float, Field(ge=0, le=ANSWER_S, description="Seconds to wait for something new before answering")]


def check(ctx: Ctx, spec: Spec = DEFAULT, overrides: Overrides = None, skip_slow: bool = False) -> answers.CheckAnswer:
    """Check that a run would work on this machine: its description, paths, memory, sandbox, harness, chat template and tasks."""
    until = time.monotonic() + ANSWER_S
    with _session(ctx).control(start=True) as up:
        request = spec_request(spec, overrides or {}, Path.cwd())
        job = up.client.check(CheckRequest(**request.model_dump(), skip_slow=skip_slow))
        if job.report is None:
            job = up.client.check_status(job.check_id, wait_s=max(0.0, until - time.monotonic()))
        return answers.CheckAnswer.of(job, _note(up))


def check_status(ctx: Ctx, check_id: str, wait_s: Wait = ANSWER_S) -> answers.CheckAnswer:
    """The result of a check that was still running."""
    with _session(ctx).control() as up:
        return answers.CheckAnswer.of(up.client.check_status(check_id, wait_s))


def plan_run(ctx: Ctx, spec: Spec = DEFAULT, overrides: Overrides = None) -> answers.PlanAnswer:
    """What a run would do: its settings with their origin, the number of trials, and the digest that start_run needs. Starts no run."""
    with _session(ctx).control(start=True) as up:
        plan = up.client.plan(spec_request(spec, overrides or {}, Path.cwd()))
        return answers.PlanAnswer.of(plan, _note(up))


class Confirmation(BaseModel):
    """The one question that a person answers before a run starts."""

    start: bool = Field(title="Start the run", default=False)


def ask(ctx: Ctx, digest: str, confirm: bool) -> Elicit[Confirmation] | Confirmation:
    """Ask the person through the client where it shows forms; elsewhere `confirm` alone carries their answer."""
    if confirm and _shows_forms(ctx):
        with _session(ctx).control() as up:
            return Elicit(f"{up.client.planned(digest).summary}\nStart this run?", Confirmation)
    return Confirmation(start=confirm)


def start_run(
    ctx: Ctx,
    digest: Annotated[str, Field(description="Digest of the plan that the person saw (plan_run)")],
    answer: Annotated[ElicitationResult[Confirmation], Resolve(ask)],
    confirm: Annotated[bool, Field(description="True only after the person agreed to this plan")] = False,
) -> answers.StartAnswer:
    """Start the run of a plan, once: to start it again, plan again. It uses this machine for minutes or longer; stop_run ends it."""
    if not confirm:
        raise ToolError("not started: show the plan to the person, and call again with confirm true when they agree")
    if isinstance(answer, CancelledElicitation):
        raise ToolError("not started: the question was dismissed without an answer; ask again, or use `rl run` in a terminal")
    if not (isinstance(answer, AcceptedElicitation) and answer.data.start):
        raise ToolError("not started: the person declined this plan")
    with _session(ctx).control() as up:
        run = up.client.start(digest)
        url = up.client.dashboard(run.run_id)
        return answers.StartAnswer(summary=f"Run {run.run_id} is {run.state}.", run_id=run.run_id, state=run.state, dashboard=url)


async def run_status(ctx: Ctx, run: RunId = "", wait_s: Wait = 0) -> answers.RunAnswer:
    """State, curves, the step that is forming, outcomes and the first problem of a run. Reports progress while it waits."""
    session = _session(ctx)

    def fetch(run_id: str) -> answers.RunAnswer:
        with session.control() as up:
            picked = run_id or up.client.latest().run_id
            return answers.RunAnswer.of(up.client.run(picked), up.client.dashboard(picked))

    until = time.monotonic() + wait_s
    status = await anyio.to_thread.run_sync(fetch, run)
    while not status.finished and time.monotonic() + PROGRESS_S < until:
        await ctx.report_progress(status.steps_done, status.steps_expected, status.now or status.summary)
        await anyio.sleep(PROGRESS_S)
        status = await anyio.to_thread.run_sync(fetch, status.run_id)
    return status


def list_runs(ctx: Ctx) -> answers.RunsAnswer:
    """The newest runs with their state and progress."""
    with _session(ctx).control() as up:
        runs = up.client.runs()[:RUNS]
        return answers.RunsAnswer(summary="\n".join(show.runs(runs)), runs=[answers.RunLine.of(run) for run in runs])


def diagnose_run(ctx: Ctx, run: RunId = "") -> answers.DiagnosisAnswer:
    """Findings of the detectors with the rows behind them. A finding is a candidate: a person confirms or rejects it."""
    with _session(ctx).control() as up:
        return answers.DiagnosisAnswer.of(up.client.diagnose(run or up.client.latest().run_id))


def review_finding(ctx: Ctx, finding_id: str, verdict: Verdict, note: str = "") -> answers.Answer:
    """Store a person's decision about a finding; later diagnoses show it."""
    with _session(ctx).control() as up:
        finding = up.client.review(finding_id, verdict, note)
        return answers.Answer(summary=f"{finding.title}: {finding.verdict}.", id=finding.id)


def stop_run(ctx: Ctx, run: Annotated[str, Field(description="Run id")]) -> answers.Answer:
    """Stop a run for good: its trials are cancelled and it cannot be resumed. What it recorded stays."""
    with _session(ctx).control() as up:
        stopped = up.client.stop(run)
        return answers.Answer(summary=f"Run {stopped.run_id} is {stopped.state}.", id=stopped.run_id)


def dashboard_url(ctx: Ctx, run: Annotated[str, Field(description="Run id; empty: the list of runs")] = "") -> answers.UrlAnswer:
    """Where a browser on this machine shows the run while it goes on."""
    with _session(ctx).control() as up:
        if run:
            up.client.run(run)
        url = up.client.dashboard(run or None)
        return answers.UrlAnswer(summary=f"Live UI: {url}", url=url)


class _Strict(MCPServer[Session]):
    """Says in one line what is wrong with arguments. One that a tool does not have would be dropped, and a run planned without it."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Ctx | None = None) -> Any:
        known = {tool.name: list(tool.input_schema["properties"]) for tool in await self.list_tools()}
        unknown = [argument for argument in arguments if argument not in known.get(name, arguments)]
        if unknown:
            raise ToolError(f"{name} has no argument {unknown[0]!r}: it takes {', '.join(known[name]) or 'none'}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            wrong = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.__cause__.errors())
            raise ToolError(f"{name}: {'; '.join(wrong)}") from None


def build(data: DataDir) -> MCPServer[Session]:
    """The server for one data directory."""

    @asynccontextmanager
    async def session(_: MCPServer[Session]) -> AsyncIterator[Session]:
        yield Session(data)

    server = _Strict("control", title="lego-rl control plane", version=version("lego-rl"), log_level="WARNING", lifespan=session)
    reads = ToolAnnotations(read_only_hint=True, destructive_hint=False)
    writes = ToolAnnotations(read_only_hint=False, destructive_hint=False)
    destroys = ToolAnnotations(read_only_hint=False, destructive_hint=True)
    server.add_tool(check, title="Check a run before it starts", annotations=reads)
    server.add_tool(check_status, title="Result of a check", annotations=reads)
    server.add_tool(plan_run, title="Plan a run", annotations=reads)
    server.add_tool(start_run, title="Start a planned run", annotations=destroys)
    server.add_tool(run_status, title="Status of a run", annotations=reads)
    server.add_tool(list_runs, title="List runs", annotations=reads)
    server.add_tool(diagnose_run, title="Diagnose a run", annotations=reads)
    server.add_tool(review_finding, title="Confirm or reject a finding", annotations=writes)
    server.add_tool(stop_run, title="Stop a run", annotations=destroys)
    server.add_tool(dashboard_url, title="Address of the Live UI", annotations=reads)
    return server


def _session(ctx: Ctx) -> Session:
    return ctx.request_context.lifespan_context


def _note(up: Up) -> str:
    return f"(Started the control plane at {up.client.url}.) " if up.started else ""


def _shows_forms(ctx: Ctx) -> bool:
    """A bare `elicitation: {}` means forms too: it is older than the modes."""
    capabilities = ctx.client_capabilities
    asks = capabilities.elicitation if capabilities else None
    return asks is not None and (asks.form is not None or asks.url is None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plugin.mcp_server", description="lego-rl control plane as an MCP server on stdio")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir())
    build(DataDir(parser.parse_args().data_dir)).run("stdio")


if __name__ == "__main__":
    main()
