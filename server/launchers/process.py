"""A run as processes on this machine. With `trainer.launcher: ray` or `kubernetes` the trainer's process stands in for one in a cluster."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time

import sqlalchemy as sa

from ..db import Database
from ..db.models import LogRow, PlanRow, ProcessRow, Run
from ..schemas.rundir import RunDir, RunFile, write_atomic
from ..schemas.runspec import RunSpec
from ..schemas.states import TERMINAL_RUN_STATES, RunState
from ..security import hash_token
from ..settings import Settings
from .identity import MARKER, Identity, is_alive, kill_marked
from .supervisor import LaunchFile, record

PROCESS_LOGS = ("supervisor", "runner", "trainer")


class CannotLaunch(Exception):
    """One line: why no process could be started."""


class ProcessLauncher:
    def __init__(self, settings: Settings, db: Database) -> None:
        self._settings = settings
        self._db = db
        self._children: list[subprocess.Popen[bytes]] = []

    def create(self, digest: str, spec: RunSpec, name: str, steps: int) -> tuple[str, bool]:
        """(run id, True) of a new run with its directory; nothing runs yet. (run id, False) when one has started since the plan was shown
        last: a request that is sent again must not start a second run.

        Raises CannotLaunch.
        """
        run_id = f"{time.strftime('%y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        event_token = secrets.token_urlsafe(32)
        run = RunDir(self._settings.data.runs / run_id)
        run_file = RunFile(
            run_id=run_id,
            server_url=self._settings.url,
            event_token=event_token,
            runner_token=secrets.token_urlsafe(32),
            runtimes=self._settings.data.runtimes,
            spec=spec,
        )
        inside = spec.trainer.launcher == "kubernetes"
        launch_file = LaunchFile(
            run_id=run_id,
            runner=[] if inside else [str(self._settings.sandbox_python), *self._settings.runner_args, "--run-dir", str(run.root)],
            trainer=[str(self._settings.trainer_python), *self._settings.trainer_args, "--run-dir", str(run.root)],
            stop_grace_s=self._settings.stop_grace_s,
            trainer_restarts=0 if inside and not spec.trainer.checkpoint.every else spec.trainer.checkpoint.restarts,
        )
        try:
            with self._db.write() as session:
                shown = session.scalars(sa.select(PlanRow.created).where(PlanRow.digest == digest).with_for_update()).one()
                started = session.scalar(sa.select(Run.run_id).where(Run.digest == digest, Run.created >= shown).limit(1))
                if started is not None:
                    return started, False
                _lay_out(run, run_file, launch_file)
                row = Run(run_id=run_id, name=name, digest=digest, state=RunState.CREATED, created=time.time(), steps_expected=steps)
                row.token_sha256 = hash_token(event_token)
                session.add(row)
                session.flush()
                session.add_all(LogRow(run_id=run_id, name=log, path=f"logs/{log}.log") for log in PROCESS_LOGS)
        except (OSError, sa.exc.SQLAlchemyError) as error:
            shutil.rmtree(run.root, ignore_errors=True)
            if isinstance(error, OSError):
                raise CannotLaunch(f"cannot write {run.root}: {error.strerror}") from None
            raise
        return run_id, True

    def start(self, run_id: str) -> None:
        """Start the run's supervisor. Raises CannotLaunch."""
        self.spawn(run_id)
        with self._db.write() as session:
            row = session.get_one(Run, run_id)
            row.state, row.started = RunState.STARTING, time.time()

    def spawn(self, run_id: str) -> None:
        """A supervisor for the run, whatever state the record has. Raises CannotLaunch."""
        run = RunDir(self._settings.data.runs / run_id)
        command = [sys.executable, "-P", "-m", "server.launchers.supervisor", "--run-dir", str(run.root)]
        child = None
        try:
            with (run.logs / "supervisor.log").open("ab") as output:
                child = subprocess.Popen(
                    command,
                    cwd=run.root,
                    env=os.environ | {MARKER: f"{run_id}/supervisor"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            record(run, child.pid, "supervisor")
        except OSError as error:
            if child is not None:  # not to be found again: the ledger cannot be written
                kill_marked(run_id)
                child.wait()
            problem = f"cannot start the run's supervisor: {error.strerror}"
            with self._db.write() as session:
                row = session.get_one(Run, run_id)
                row.state, row.problem, row.finished = RunState.FAILED, problem, time.time()
            raise CannotLaunch(problem) from None
        self._children.append(child)

    def stop(self, run_id: str) -> None:
        """Mark the run as ending; the follower asks its processes, also when this server dies now. A run that has ended is left alone."""
        with self._db.write() as session:
            run = session.scalar(sa.select(Run).where(Run.run_id == run_id).with_for_update())
            if run is None or run.state in TERMINAL_RUN_STATES:
                return
            if run.state is RunState.CREATED:
                run.state, run.finished = RunState.STOPPED, time.time()
                return
            run.state, run.reason = RunState.STOPPING, "stopped by request"

    def reap(self) -> None:
        """Take note of supervisors that ended, so that they do not stay as zombies."""
        self._children = [child for child in self._children if child.poll() is None]


def _lay_out(run: RunDir, run_file: RunFile, launch_file: LaunchFile) -> None:
    run.root.mkdir(mode=0o700)
    for directory in (run.logs, run.spool):
        directory.mkdir()
    write_atomic(run.run_file, run_file.model_dump_json())
    write_atomic(run.launch_file, launch_file.model_dump_json())


def owned(db: Database, run_id: str, role: str) -> list[Identity]:
    """The living processes of a run with this role, from the ledger."""
    with db.read() as session:
        rows = session.scalars(sa.select(ProcessRow).where(ProcessRow.run_id == run_id, ProcessRow.role == role))
        known = [Identity(boot_id=row.boot_id, pid=row.pid, start_ticks=row.start_ticks) for row in rows]
    return [identity for identity in known if is_alive(identity)]
