"""Regrade a run: every archived diff that was not yet graded from the same inputs, each verdict on disk before the next.

The spool of the source `regrade` is the memory: what it holds is done, whether or not the server has it already. A regrade that was
killed therefore goes on where it was when it is started again, and one that is started twice does nothing the second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.environments.backend import Backend, backend_of
from sandbox.runner.drive import Room
from sandbox.tasks.images import images_of
from server.schemas.events import RegradeBody
from server.schemas.outcome import Failed, Scored
from server.schemas.regrade import ArchivedTrial, Verifier
from server.schemas.rundir import RunDir
from server.schemas.spool import Reporter, read_spool
from server.schemas.states import Phase
from server.schemas.tasks import HELD_OUT, TRAIN

from .play import separate, shared
from .tasks import NoTask, current_task, inputs

SOURCE = "regrade"
DELIVER_S = 30


class Busy(Exception):
    """Another regrade of the same run is under way."""


@dataclass
class Progress:
    """Counts of one invocation. `problems` are trials that have no second verdict, each with why; they are tried again the next time."""

    total: int = 0
    done_before: int = 0
    graded: int = 0
    problems: list[str] = field(default_factory=list)
    delivered: bool = True


async def regrade(
    run: RunDir, server_url: str, trials: list[ArchivedTrial], verifier: Verifier, said: Callable[[Progress], None]
) -> Progress:
    """Raises Busy, and SandboxError when no sandbox can be made here. `said` is called after every trial."""
    file, progress = run.load(), Progress(total=len(trials))
    with _alone(run) as scratch:
        known = _Known(run)
        reporter = Reporter(server_url, file.run_id, file.event_token, SOURCE, run.spool)
        try:
            async with backend_of(file.spec.sandbox).open(scratch / "sandboxes", file.spec.sandbox) as backend:
                room = Room(file.spec, scratch / "tasks", {}, scratch / "trials", scratch / "sandboxes", {}, {})
                room.trials.mkdir()
                tasks, slots = _Tasks(run, room, backend), asyncio.Semaphore(file.spec.sandbox.concurrency)

                async def one(trial: ArchivedTrial) -> None:
                    async with slots:
                        await _one(run, room, trial, verifier, tasks, known, reporter, progress)
                    said(progress)

                await asyncio.gather(*(one(trial) for trial in trials))
        finally:
            progress.delivered = await asyncio.to_thread(reporter.close, DELIVER_S)
    return progress


class _Known:
    """Verdicts of earlier regrades of the run, by what they were reached from."""

    def __init__(self, run: RunDir) -> None:
        self._verdicts: dict[tuple[str, Verifier, str], Scored] = {}
        self._newest: dict[tuple[str, Verifier], str] = {}
        for event in read_spool(run.spool / f"{SOURCE}.jsonl"):
            if isinstance(body := event.body, RegradeBody):
                self._verdicts[body.trial_id, body.verifier, body.inputs] = body.outcome
                self._newest[body.trial_id, body.verifier] = body.inputs

    def get(self, trial_id: str, verifier: Verifier, inputs: str) -> Scored | None:
        return self._verdicts.get((trial_id, verifier, inputs))

    def is_newest(self, trial_id: str, verifier: Verifier, inputs: str) -> bool:
        return self._newest[trial_id, verifier] == inputs


class _Tasks:
    """Each task is prepared once, with its image, when its first trial asks for it."""

    def __init__(self, run: RunDir, room: Room, backend: Backend) -> None:
        self._run, self._room, self._backend = run, room, backend
        self._ready: dict[tuple[str, str], asyncio.Future[Path]] = {}

    async def get(self, split: str, task: str) -> Path:
        """Raises NoTask."""
        if (split, task) not in self._ready:
            self._ready[split, task] = asyncio.ensure_future(self._make(split, task))
        return await self._ready[split, task]

    async def _make(self, split: str, task: str) -> Path:
        kept, spec = self._run.tasks / split / task, self._room.spec
        made = await asyncio.to_thread(current_task, kept, spec.data, split, self._room.tasks)
        await self._backend.fetch(await asyncio.to_thread(images_of, [made], spec.sandbox))
        return made


async def _one(
    run: RunDir,
    room: Room,
    trial: ArchivedTrial,
    verifier: Verifier,
    tasks: _Tasks,
    known: _Known,
    reporter: Reporter,
    progress: Progress,
) -> None:
    split = TRAIN if trial.phase is Phase.TRAIN else HELD_OUT
    try:
        diff = await asyncio.to_thread(_diff, run, trial)
        task = await tasks.get(split, trial.task)
        named = await asyncio.to_thread(inputs, task, trial.sha256, verifier)
    except (NoTask, OSError, ValueError) as error:
        progress.problems.append(f"{trial.trial_id}: {error}")
        return
    before = known.get(trial.trial_id, verifier, named)
    if before is not None:
        progress.done_before += 1
        if not known.is_newest(trial.trial_id, verifier, named):  # the task is again as it was
            reporter.report(RegradeBody(trial_id=trial.trial_id, verifier=verifier, inputs=named, outcome=before))
        return
    outcome = await (separate if verifier == "separate" else shared)(room, trial.trial_id, trial.task, split, diff)
    if isinstance(outcome, Failed):
        progress.problems.append(f"{trial.trial_id}: {outcome.cause} in {outcome.stage}: {outcome.detail}")
        return
    reporter.report(RegradeBody(trial_id=trial.trial_id, verifier=verifier, inputs=named, outcome=outcome))
    progress.graded += 1


def _diff(run: RunDir, trial: ArchivedTrial) -> Path:
    """The archived file, if it is the one that the record names. Raises OSError and ValueError."""
    root = run.root.resolve()
    path = (root / trial.path).resolve()
    if not path.is_relative_to(root):
        raise ValueError(f"{trial.path} is not in the run's directory")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != trial.sha256:
            raise ValueError(f"{trial.path} is not what was archived: its SHA-256 differs")
    return path


@contextlib.contextmanager
def _alone(run: RunDir) -> Iterator[Path]:
    """An empty scratch directory of the run, locked; what a killed regrade left in it goes first."""
    scratch = run.root / SOURCE
    scratch.mkdir(exist_ok=True)
    lock = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Busy(f"another regrade of run {run.root.name} is under way: wait for its end") from None
    try:
        for name in ("tasks", "trials"):
            shutil.rmtree(scratch / name, ignore_errors=True)
        yield scratch
    finally:
        for name in ("tasks", "trials"):
            shutil.rmtree(scratch / name, ignore_errors=True)
        os.close(lock)
