"""The stand-in's course: take up or ask for the job, follow it, see it off.

`JobFile` is written before the cluster is asked for anything, so whatever dies in between, the next stand-in finds the job: by its uid,
or by labels that only this run's stand-ins know.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from server.schemas.events import WaitingBody
from server.schemas.rundir import RunDir, RunFile, write_atomic
from server.schemas.spool import Reporter

from .. import FINAL, TERMINATED, FinalError
from . import looking, sources
from .api import Absent, Busy, Cluster, ClusterError, Object
from .log import LogReader
from .manifest import PLURAL, Job, rayjob, secret, settings_of

FILE = "cluster-job.json"
POLL_S = 1.0
STOP_S = 12
"""How long to try to delete a job when told to end: less than the supervisor's patience."""
REMIND_S = 60
"""A run that waits for machines is not stalled: it says so again."""
LAST_WORDS = 5
"""How often to try to read the log of a job that is over."""
ASK_S = 60
"""How long a busy API server may refuse the creation of a job."""
NO_KUBERAY = (
    "the cluster knows no RayJob: install KubeRay 1.5.1 or newer (helm install kuberay-operator kuberay/kuberay-operator), and let its "
    "operator watch namespace {namespace}"
)


class JobFile(BaseModel):
    """The newest job of a run. `uid` is None until the API server has answered; `code` until it is over."""

    model_config = ConfigDict(extra="forbid")

    owner: str
    attempt: int
    uid: str | None = None
    code: int | None = None
    log: str = ""
    """Time of the last line of its log that was printed."""

    def job(self, run_id: str) -> Job:
        return Job(run_id=run_id, attempt=self.attempt, owner=self.owner, sources=sources.digest())


def submit(run: RunDir, file: RunFile, attempt: int, poll_s: float = POLL_S) -> int:
    """Run trainer and runner as a job to their end; the driver's exit code. `attempt` 1 is a supervisor that has just begun."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    place = run.root / FILE
    try:
        state = _state(place, attempt)
        if state.code is not None:
            return state.code
        return StandIn(Cluster.connect(settings_of(file.spec)), run, file, state, told, poll_s).run()
    except (FinalError, ClusterError) as error:
        print(f"failed: {error}", flush=True)
        return FINAL


def _state(place: Path, attempt: int) -> JobFile:
    """An end that was noted and not yet acted on is told to a new supervisor again; the next attempt follows one that is over."""
    try:
        known = JobFile.model_validate_json(place.read_bytes())
    except FileNotFoundError:
        return JobFile(owner=secrets.token_hex(8), attempt=1)
    except ValueError as error:
        raise FinalError(f"{place} cannot be read, so the run's job is not known: {error}") from error
    if known.code is None or attempt == 1:
        return known
    return JobFile(owner=known.owner, attempt=known.attempt + 1)


class StandIn:
    def __init__(self, cluster: Cluster, run: RunDir, file: RunFile, state: JobFile, told: threading.Event, poll_s: float) -> None:
        self._cluster = cluster
        self._file = file
        self._state = state
        self._place = run.root / FILE
        self._told = told
        self._poll_s = poll_s
        self._job = state.job(file.run_id)
        self._reporter = Reporter(file.server_url, file.run_id, file.event_token, "launcher", run.spool)
        self._said, self._said_at = "", 0.0
        self._silent = ""

    def run(self) -> int:
        try:
            self._keep()
            uid = self._taken_up()
            if uid is None:
                return TERMINATED
            return self._follow(uid)
        finally:
            self._reporter.close(timeout_s=2)

    # ---------------------------------------------------------------- asking for it

    def _taken_up(self) -> str | None:
        """The job's uid, with its Secret in place; None when told to end before there was one. Raises ClusterError for a refusal."""
        end = time.monotonic() + ASK_S
        while not self._told.is_set():
            try:
                uid = self._state.uid or self._left_behind() or self._created()
                self._state.uid = uid
                self._keep()
                self._give_secret(uid)
                return uid
            except Busy as error:
                if self._state.uid is None and time.monotonic() > end:
                    raise
                self._unreachable(error)
                self._told.wait(self._poll_s)
        self._withdraw()
        return None

    def _withdraw(self) -> None:
        """Told to end early: what was asked for, and perhaps given, is not wanted."""
        try:
            uid = self._state.uid or self._left_behind()
        except ClusterError as error:
            print(f"RayJob {self._job.name} may have been created, and the cluster does not say: {error}", flush=True)
            return
        if uid is not None:
            self._delete(uid)

    def _left_behind(self) -> str | None:
        """A job that was created, and its answer never noted."""
        try:
            known = self._cluster.items(PLURAL, self._job.selector)
        except Absent as error:
            raise FinalError(NO_KUBERAY.format(namespace=self._cluster.namespace)) from error
        for item in known:
            if item["metadata"]["name"] == self._job.name:
                uid: str = item["metadata"]["uid"]
                return uid
        return None

    def _created(self) -> str:
        try:
            created = self._cluster.create(PLURAL, rayjob(self._file.spec, self._job))
        except Absent as error:
            raise FinalError(f"there is no namespace {self._cluster.namespace} (trainer.cluster.kubernetes.namespace): {error}") from error
        print(f"asked {self._cluster.host} for RayJob {self._job.name} in namespace {self._cluster.namespace}", flush=True)
        uid: str = created["metadata"]["uid"]
        return uid

    def _give_secret(self, uid: str) -> None:
        try:
            self._cluster.create("secrets", secret(self._file, self._job, uid))
        except ClusterError as error:
            if error.status == 409:  # an earlier stand-in made it
                return
            if not isinstance(error, Busy):
                self._cluster.delete(PLURAL, self._job.name, uid)  # its pods would wait for ever
            raise

    # ---------------------------------------------------------------- following it

    def _follow(self, uid: str) -> int:
        log = LogReader(self._cluster, self._job, self._state.log)
        started = time.monotonic()
        while not self._told.is_set():
            try:
                job = self._seen(uid)
                end = looking.end_of(job)
                if end is not None:
                    return self._ended(uid, end, log)
                self._print(log)
                if looking.is_running(job) or looking.is_queued(job):
                    started = time.monotonic()
                self._watch(uid, job, time.monotonic() - started)
                self._silent = ""
            except ClusterError as error:  # rights and connections come back; a run is not given up for them
                self._unreachable(error)
            self._told.wait(self._poll_s)
        return self._delete(uid)

    def _seen(self, uid: str) -> Object:
        """Raises FinalError when the job is gone: whoever removed it does not want it again."""
        try:
            job = self._cluster.get(PLURAL, self._job.name)
        except Absent as error:
            raise FinalError(f"RayJob {self._job.name} was deleted from the cluster, and not by this server") from error
        if job["metadata"]["uid"] != uid:
            raise FinalError(f"RayJob {self._job.name} was deleted from the cluster and another one has its name now, which is left alone")
        return job

    def _print(self, log: LogReader) -> None:
        lines = log.new_lines()
        for line in lines:
            print(line)
        if lines:
            print(end="", flush=True)
            self._state.log = log.last
            self._keep()

    def _watch(self, uid: str, job: Object, waited_s: float) -> None:
        """Say what the job waits for. Raises FinalError when that will not come, or has taken too long."""
        pods = self._cluster.items("pods", self._job.selector)
        reason = looking.waits_for(job, pods, self._warnings(job) if not looking.is_running(job) else [])
        self._say(reason)
        why = looking.hopeless(pods)
        if not why and waited_s > (patience := settings_of(self._file.spec).start_s):
            why = f"the job did not start within {patience} s (trainer.cluster.kubernetes.start_s): {reason}"
        if why:
            self._delete(uid)
            raise FinalError(why)

    def _warnings(self, job: Object) -> list[Object]:
        """Not every account may read them, and nothing depends on it."""
        names = {self._job.name, job.get("status", {}).get("rayClusterName", "")} - {""}
        try:
            found = (self._cluster.items("events", fields=f"involvedObject.name={name},type=Warning") for name in sorted(names))
            return [event for events in found for event in events]
        except ClusterError:
            return []

    def _say(self, reason: str) -> None:
        due = bool(reason) and time.monotonic() - self._said_at > REMIND_S
        if reason == self._said and not due:
            return
        if reason != self._said:
            print(reason or "all pods are ready and the job runs", flush=True)
        self._said, self._said_at = reason, time.monotonic()
        self._reporter.report(WaitingBody(reason=reason))

    def _unreachable(self, error: ClusterError) -> None:
        """Once for each kind of trouble."""
        if str(error) != self._silent:
            self._silent = str(error)
            print(f"will ask again: {error}", flush=True)

    # ---------------------------------------------------------------- seeing it off

    def _ended(self, uid: str, end: looking.End, log: LogReader) -> int:
        """Its last words, as far as they can be had, then its end: noted first, so that nobody begins the next attempt without knowing."""
        for tries_left in reversed(range(LAST_WORDS)):
            try:
                self._print(log)
                break
            except ClusterError as error:
                self._unreachable(error)
                if tries_left:
                    time.sleep(self._poll_s)
        if end.why:
            print(f"failed: {end.why}", flush=True)
        self._state.code = end.code
        self._keep()
        self._delete(uid)
        return end.code

    def _delete(self, uid: str) -> int:
        """The job, its cluster and its Secret; only the one with this uid."""
        until = time.monotonic() + STOP_S
        while True:
            try:
                self._cluster.delete(PLURAL, self._job.name, uid)
                return TERMINATED
            except ClusterError as error:
                if time.monotonic() + self._poll_s > until:
                    by_hand = f"kubectl --namespace {self._cluster.namespace} delete rayjob {self._job.name}"
                    print(f"RayJob {self._job.name} (uid {uid}) may go on, it could not be deleted: {error}; use `{by_hand}`", flush=True)
                    return TERMINATED
                time.sleep(self._poll_s)

    def _keep(self) -> None:
        write_atomic(self._place, self._state.model_dump_json())
