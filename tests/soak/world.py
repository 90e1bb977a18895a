"""What a soak runs in: a real server, and a real runner that is started again whenever it dies, as the supervisor does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox.harnesses.pins import MINI_SWE_AGENT
from sandbox.harnesses.store import Store
from server.db import Database
from server.db.models import PlanRow, Run
from server.launchers.supervisor import record
from server.schemas.datadir import DataDir, ServerFile, default_data_dir
from server.schemas.rundir import RunDir, RunFile, write_atomic
from server.schemas.runspec import RunSpec
from server.schemas.states import RunState
from server.security import hash_token

RUN = "soak"
HARNESS = MINI_SWE_AGENT.name
_READY_S = 180


class World:
    def __init__(self, data: DataDir, url: str, token: str) -> None:
        self.data, self.url, self.token = data, url, token
        self.run = RunDir(data.runs / RUN)
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self._keeping: asyncio.Task[None] | None = None

    @property
    def runner(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep())
        deadline = time.monotonic() + _READY_S
        while not self.run.runner_file.exists():
            assert time.monotonic() < deadline, f"no runner in {_READY_S} s: {self.run.logs / 'runner.log'}"
            assert not self._keeping.done(), self._keeping.exception()
            await asyncio.sleep(0.05)

    async def _keep(self) -> None:
        while True:
            self.run.runner_file.unlink(missing_ok=True)
            with (self.run.logs / "runner.log").open("ab") as log:
                command = [sys.executable, "-P", "-m", "sandbox.runner", "--run-dir", str(self.run.root)]
                self.process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
            self.starts += 1
            await self.process.wait()
            assert self.starts < 200, "the runner does not stay up"

    async def stop(self) -> None:
        """End the runner as the supervisor would."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


@contextlib.asynccontextmanager
async def open_world(root: Path, tasks: int, concurrency: int, seed: int) -> AsyncIterator[World]:
    """A data directory below `root` with one run whose supervisor is this process."""
    store = Store(DataDir(default_data_dir()).runtimes)
    await asyncio.to_thread(store.install, MINI_SWE_AGENT)
    data, token = DataDir(root), secrets.token_urlsafe(24)
    spec = RunSpec.model_validate(
        {
            "model": {"path": "builtin:none"},
            "harnesses": [{"name": HARNESS, "version": MINI_SWE_AGENT.version, "start": "warm_fork"}],
            "data": {"family": "onebug", "train_tasks": tasks, "held_out_tasks": 1, "seed": seed},
            "sandbox": {"concurrency": concurrency, "budgets": {"verifier_s": 60}},
        }
    )
    await asyncio.to_thread(_register, data, spec, token)
    log = root / "server.log"
    with log.open("wb") as output:
        command = [sys.executable, "-P", "-m", "server", "--port", "0", "--data-dir", str(root)]
        server = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        while not data.server_file.exists():
            assert server.returncode is None, log.read_text()
            await asyncio.sleep(0.05)
        world = World(data, ServerFile.model_validate_json(data.server_file.read_bytes()).url, token)
        file = RunFile(
            run_id=RUN, server_url=world.url, event_token=token, runner_token=token, runtimes=store.root, spec=spec
        ).model_dump_json()
        write_atomic(world.run.run_file, file)
        await world.start()
        try:
            yield world
        finally:
            await world.stop()
    finally:
        server.terminate()
        await server.wait()


def _register(data: DataDir, spec: RunSpec, token: str) -> None:
    run = RunDir(data.runs / RUN)
    run.logs.mkdir(parents=True)
    db = Database(f"sqlite:///{data.database}")
    db.migrate()
    now = time.time()
    with db.write() as session:
        session.add(PlanRow(digest="soak", spec=spec.model_dump(mode="json"), provenance={}, summary="", created=now))
        session.flush()
        state = RunState.STARTING
        hashed = hash_token(token)
        session.add(Run(run_id=RUN, name=RUN, digest="soak", state=state, token_sha256=hashed, steps_expected=1, created=now, started=now))
    db.close()
    record(run, os.getpid(), "supervisor")
