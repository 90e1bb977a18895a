"""A runner's life: tasks prepared, runtimes verified, warm parents up, then listening; on SIGTERM everything is ended and removed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path

import uvicorn

from sandbox.doctor.watch import watch
from sandbox.environments.backend import Backend, backend_of
from sandbox.environments.errors import SandboxError
from sandbox.harnesses.base import HarnessAgent, Launcher
from sandbox.harnesses.registry import adapter
from sandbox.harnesses.store import RuntimeStoreError, Store
from sandbox.harnesses.warm import WarmStartError
from sandbox.tasks.images import images_of, take_trees
from sandbox.tasks.prepare import TaskError, prepare
from server.schemas.rundir import RunDir, RunFile, RunnerFile, write_atomic
from server.schemas.runspec import RunSpec
from server.schemas.spool import Reporter
from server.schemas.tasks import HELD_OUT, TaskEntry

from .app import create_app
from .drive import Room
from .trials import Trials

log = logging.getLogger(__name__)

SOURCE = "runner"


class NotReady(Exception):
    """The runner cannot start; one line that says what to do."""


async def serve(run: RunDir) -> None:
    """Run until SIGTERM or SIGINT. Raises NotReady."""
    started = time.monotonic()
    file = _load(run)
    boot = secrets.token_hex(8)
    run.trials.mkdir(exist_ok=True)
    async with open_room(file.spec, Store(file.runtimes), run.tasks, run.trials, run.root / "sandboxes") as (room, host):
        reporter = Reporter(file.server_url, file.run_id, file.event_token, SOURCE, run.spool)
        trials = Trials(room, run.root, reporter)
        app = create_app(trials, file.runner_token, boot, host.limits_mode)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            config = uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=600,  # never close an idle connection just as the trainer reuses it
            )
            server = uvicorn.Server(config)
            # uvicorn raises a signal again once it has stopped serving; what is left to clean up comes after that.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            write_atomic(run.runner_file, RunnerFile(url=url, pid=os.getpid(), boot=boot).model_dump_json())
            log.info("ready at %s after %.1f s, %s, limits by %s", url, time.monotonic() - started, host.label, host.limits_mode)
            doctor = asyncio.create_task(watch(run.root.parent, reporter))
            watcher = asyncio.create_task(_stop_when_lost(host, server, trials))
            try:
                await server.serve([listener])
            finally:
                lost = watcher.result() if watcher.done() else ""
                watcher.cancel()
                doctor.cancel()
                await trials.cancel_all()
                await asyncio.to_thread(reporter.close, 2)
            if lost:
                raise NotReady(f"{lost}; its sandboxes are gone and the runner ends, to be started again")


async def _stop_when_lost(host: Backend, server: uvicorn.Server, trials: Trials) -> str:
    trials.closed = why = await host.ended()
    server.should_exit = True
    return why


def _load(run: RunDir) -> RunFile:
    try:
        return run.load()
    except FileNotFoundError as error:
        raise NotReady(f"{run.root} is not a run's directory: it has no run.json") from error
    except ValueError as error:
        raise NotReady(f"{run.run_file} cannot be read: {error}") from error


@contextlib.asynccontextmanager
async def open_room(
    spec: RunSpec, store: Store, tasks: Path, trials: Path, sandboxes: Path, limit: int | None = None
) -> AsyncIterator[tuple[Room, Backend]]:
    """Everything that trials need, ready: tasks, runtimes, warm parents, sandboxes. Raises NotReady.

    `limit` bounds the tasks of a split that come from a directory.
    """
    agents = agents_of(spec)
    async with contextlib.AsyncExitStack() as stack:
        try:
            starting = [asyncio.create_task(agents[harness.name].prepare(harness, store)) for harness in spec.harnesses]
            host = await stack.enter_async_context(backend_of(spec.sandbox).open(sandboxes, spec.sandbox))
            for what, place in (("this program", Path(__file__)), ("the run's directory", tasks)):
                if (seen := host.exposed(place)) is not None:
                    raise NotReady(f"{what} lies in {seen}, which every agent can read, tests and solutions too: put it elsewhere")
            entries = await asyncio.to_thread(prepare, spec.data, tasks, limit)
            if spec.data.family is None:  # a generated task says nothing about memory
                await asyncio.to_thread(_enough_memory, spec, agents, entries, tasks)
            places = [tasks / split / entry.task for split, found in entries.items() for entry in found]
            await host.fetch(await asyncio.to_thread(images_of, places, spec.sandbox))
            await take_trees(host, places, spec.sandbox)
            launchers: dict[str, Launcher] = {}
            for harness, start in zip(spec.harnesses, starting, strict=True):
                launchers[harness.name] = await _made_ready(harness.name, start)
                stack.push_async_callback(launchers[harness.name].stop)
        except (RuntimeStoreError, WarmStartError, SandboxError, TaskError, ValueError) as error:
            raise NotReady(str(error)) from error
        index = {split: [entry.task for entry in found] for split, found in entries.items()}
        yield Room(spec, tasks, index, trials, sandboxes, launchers, agents), host


def _enough_memory(
    spec: RunSpec, agents: Mapping[str, type[HarnessAgent]], entries: Mapping[str, Sequence[TaskEntry]], tasks: Path
) -> None:
    """A task's own limit takes the place of the run's. Raises TaskError for one in which a harness that may get it could not live."""
    if not (needs := _needs_mb(spec, agents)):
        return  # a room without harnesses
    for split, found in entries.items():
        for entry in found:
            text = (tasks / split / entry.task / "task.toml").read_text(encoding="utf-8")
            given = tomllib.loads(text).get("environment", {}).get("memory_mb")
            fixed = (split == HELD_OUT and spec.trainer.evaluation.harness) or entry.harness
            needy = fixed if fixed in needs else max(needs, key=needs.__getitem__)
            if given and given < needs[needy]:
                raise TaskError(
                    f"task {entry.task}: memory_mb under [environment] of its task.toml is {given}, {needy} needs {needs[needy]}: raise "
                    'it, or give the task another harness (`harness = "NAME"` under [metadata])'
                )


def _needs_mb(spec: RunSpec, agents: Mapping[str, type[HarnessAgent]]) -> dict[str, int]:
    return {harness.name: agents[harness.name].needs_mb(harness) for harness in spec.harnesses}


async def _made_ready(name: str, start: Awaitable[Launcher]) -> Launcher:
    """Raises NotReady for what an adapter of anybody's raises, as for its own errors."""
    try:
        return await start
    except (RuntimeStoreError, WarmStartError, ValueError):
        raise
    except Exception as error:  # see above
        log.exception("harness %s", name)
        raise NotReady(f"harnesses: {name} cannot be made ready, its adapter raised {type(error).__name__}: {error}") from error


def agents_of(spec: RunSpec) -> dict[str, type[HarnessAgent]]:
    """The class of each harness. Raises NotReady for one that is unknown, or that could not live within the limits."""
    try:
        agents = {harness.name: adapter(harness) for harness in spec.harnesses}
    except ValueError as error:
        raise NotReady(str(error)) from error
    given = spec.sandbox.limits.memory_mb
    for name, needs in _needs_mb(spec, agents).items():
        if given < needs:
            raise NotReady(f"sandbox.limits.memory_mb: {name} itself needs {needs}, {given} are given; raise the limit")
    if spec.rollout.no_tool_call_cap and (mute := [name for name, agent in agents.items() if not agent.calls_tools]):
        raise NotReady(
            f"rollout.no_tool_call_cap: {mute[0]} calls no tools on the wire, so the cap would end all of its rollouts; set it to 0"
        )
    warm = [harness.name for harness in spec.harnesses if harness.start == "warm_fork"]
    if warm and not backend_of(spec.sandbox).can_fork:
        raise NotReady(f"harnesses: {warm[0]} cannot be forked into a sandbox of {spec.sandbox.environment}; set `start: exec`")
    return agents
