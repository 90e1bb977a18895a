"""The trials of a runner: accepted once each, bounded in number, followed by long polls, reported as they go."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from pathlib import Path
from urllib.parse import urlsplit

from sandbox.harnesses.base import HarnessAgent
from sandbox.harnesses.logs import read_log
from server.schemas.events import ArchiveBody, StageTimingBody, TrialBody
from server.schemas.harnesslog import HarnessLog
from server.schemas.outcome import ADMISSION, Cause, Failed, Scored, Stage
from server.schemas.spool import Reporter
from server.schemas.states import TERMINAL_TRIAL_STATES, TrialState
from server.schemas.trials import ArtifactRef, StageTiming, TrialRequest, TrialView

from .drive import Attempt, Room
from .metrics import Metrics
from .outcomes import Facts, decide

log = logging.getLogger(__name__)

_RETRIED_HERE = {Cause.SANDBOX_SETUP, Cause.AGENT_SETUP}
_HARNESS_LOGS = ("agent/trajectory.json", "agent/stream.jsonl", "agent/stderr.log", "agent/harness.log")
_ARTIFACTS = (*_HARNESS_LOGS, "verifier/verdict.json", "result.json")
DIFF = "diff"
"""Name of the artifact that a trial is graded from: what the agent changed, never tests or a solution."""


class TrialConflict(Exception):
    """The same trial id with another request."""


class BadRequest(Exception):
    """The request names a task, a harness or an address that a trial cannot have."""


class Closed(Exception):
    """The runner is about to end: the next one can take the trial."""


class LiveTrial:
    """One trial. Its `view` is replaced, never changed."""

    def __init__(self, request: TrialRequest, reporter: Reporter, metrics: Metrics) -> None:
        self.request = request
        self.view = TrialView(trial_id=request.trial_id, state=TrialState.QUEUED, stage=Stage.QUEUED)
        self.task: asyncio.Task[None] | None = None
        self.finished = asyncio.Event()
        self._reporter = reporter
        self._metrics = metrics
        metrics.accepted()

    def enter(self, stage: Stage, state: TrialState = TrialState.RUNNING, outcome: Scored | Failed | None = None) -> None:
        """Close the timing of the stage before, open the next one's, and report both."""
        now = time.time()
        timings = list(self.view.timings)
        if timings and timings[-1].finished is None:
            timings[-1] = last = timings[-1].model_copy(update={"finished": now})
            self._reporter.report(StageTimingBody(trial_id=self.request.trial_id, stage=last.stage, started=last.started, finished=now))
            self._metrics.left(last.stage, now - last.started)
        if state not in TERMINAL_TRIAL_STATES:
            timings.append(StageTiming(stage=stage, started=now))
        self._metrics.moved(self.view.state, state)
        self.view = self.view.model_copy(update={"state": state, "stage": stage, "timings": timings, "outcome": outcome})
        self._reporter.report(TrialBody(trial_id=self.request.trial_id, state=state, stage=stage))

    def finish(
        self, outcome: Scored | Failed, exit_code: int | None, artifacts: list[ArtifactRef], log_facts: HarnessLog | None = None
    ) -> None:
        for diff in (artifact for artifact in artifacts if artifact.name == DIFF):
            self._reporter.report(ArchiveBody(trial_id=self.request.trial_id, path=diff.path, size=diff.size, sha256=diff.sha256))
        stage = Stage.DONE if isinstance(outcome, Scored) else outcome.stage
        state = TrialState.SCORED if isinstance(outcome, Scored) else TrialState.FAILED
        self.enter(stage, state, outcome)
        self._metrics.ended(outcome)
        self.view = self.view.model_copy(update={"exit_code": exit_code, "artifacts": artifacts, "log": log_facts})
        self.finished.set()


class Trials:
    def __init__(self, room: Room, root: Path, reporter: Reporter) -> None:
        self._room = room
        self._root = root
        self._reporter = reporter
        self._slots = asyncio.Semaphore(room.spec.sandbox.concurrency)
        self._reading = asyncio.Lock()
        self._trials: dict[str, LiveTrial] = {}
        self.metrics = Metrics()
        self.closed = ""
        """Why no trial is accepted any more."""

    @property
    def live(self) -> int:
        return sum(not trial.finished.is_set() for trial in self._trials.values())

    def submit(self, request: TrialRequest) -> TrialView:
        """Accept a trial, or answer with the one that has this id. Raises TrialConflict, BadRequest and Closed."""
        known = self._trials.get(request.trial_id)
        if known is not None:
            if known.request != request:
                raise TrialConflict(f"trial {request.trial_id} exists with another request")
            return known.view
        if self.closed:
            raise Closed(self.closed)
        if request.harness not in self._room.launchers:
            raise BadRequest(f"harness {request.harness} is not among those of the run: {', '.join(self._room.launchers)}")
        address = urlsplit(request.proxy.url)
        if address.scheme != "http" or not address.hostname or not address.port:
            raise BadRequest(f"proxy.url must be http://HOST:PORT/…, not {request.proxy.url}")
        if not (self._room.tasks / request.split / request.task / "task.toml").is_file():
            raise BadRequest(f"the run has no task {request.task} in split {request.split}")
        trial = LiveTrial(request, self._reporter, self.metrics)
        self._trials[request.trial_id] = trial
        trial.task = asyncio.create_task(self._run(trial), name=f"trial {request.trial_id}")
        return trial.view

    async def wait(self, trial_id: str, seconds: float) -> TrialView:
        """The trial's view once it has ended, or as it is after `seconds`. Raises KeyError."""
        trial = self._trials[trial_id]
        if seconds > 0 and not trial.finished.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await trial.finished.wait()
            except TimeoutError:
                pass
        return trial.view

    def cancel(self, trial_id: str) -> TrialView:
        """Ask a trial to end as `Failed(cancelled)`; one that has ended stays as it is. Raises KeyError."""
        trial = self._trials[trial_id]
        if trial.task is not None:
            trial.task.cancel()
        return trial.view

    async def cancel_all(self) -> None:
        tasks = [trial.task for trial in self._trials.values() if trial.task is not None and not trial.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, trial: LiveTrial) -> None:
        try:
            outcome, attempt = await self._attempts(trial)
            directory, agent = self._room.trials / attempt.name, self._room.agents[trial.request.harness]
            artifacts = await asyncio.to_thread(_artifacts, self._root, directory, attempt.archived)
            trial.finish(outcome, attempt.exit_code, artifacts, await self._log_facts(directory / "agent", agent, attempt.exit_code))
        except asyncio.CancelledError:
            trial.finish(decide(Facts(stage=trial.view.stage, cancelled=True, error="cancelled on request")), None, [])
        except Exception as error:
            log.exception("trial %s", trial.request.trial_id)
            detail = f"the runner failed: {type(error).__name__}: {error}"
            trial.finish(Failed(stage=trial.view.stage, cause=Cause.RUNNER_LOST, detail=detail), None, [])

    async def _log_facts(self, directory: Path, agent: type[HarnessAgent], exit_code: int | None) -> HarnessLog | None:
        """One log at a time: each may take half a gigabyte while it is read."""
        async with self._reading:
            try:
                return await asyncio.to_thread(read_log, directory, agent.reads, agent.note, exit_code)
            except Exception:  # an adapter of anybody's read what an agent may have written: the outcome stands without it
                log.exception("cannot read the harness's log in %s", directory)
                return None

    async def _attempts(self, trial: LiveTrial) -> tuple[Scored | Failed, Attempt]:
        """The last attempt and what it came to. Only set-up stages are tried again."""
        async with self._slots:
            for number in itertools.count(1):
                name = trial.request.trial_id if number == 1 else f"{trial.request.trial_id}.{number}"
                attempt = Attempt(self._room, trial.request, name, trial)
                outcome = decide(await attempt.run())
                if not (isinstance(outcome, Failed) and outcome.cause in _RETRIED_HERE and number <= ADMISSION[outcome.cause].retries):
                    return outcome, attempt
                self.metrics.retried(outcome.cause)
                log.warning("trial %s is tried again: %s: %s", trial.request.trial_id, outcome.cause, outcome.detail)
        raise AssertionError("unreachable")


def _artifacts(root: Path, directory: Path, diff: Path | None) -> list[ArtifactRef]:
    paths = {name: directory / name for name in _ARTIFACTS} | ({DIFF: diff} if diff is not None else {})
    return [_reference(root, name, path) for name, path in paths.items() if path.is_file()]


def _reference(root: Path, name: str, path: Path) -> ArtifactRef:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ArtifactRef(name=name, path=str(path.relative_to(root)), size=path.stat().st_size, sha256=digest)
