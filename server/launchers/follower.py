"""Follows every run that has not ended, whoever started it: this server or one before it.

A run is followed by the ledger, its exit file and its events; nothing about it is kept in memory only, so a restarted server goes on
where the last one was.
"""

from __future__ import annotations

import logging
import signal
import threading
import time

import sqlalchemy as sa

from ..changes import Changes
from ..db import Database
from ..db.models import EvaluationDone, Run, StepDone
from ..runs.conclude import Conclusion, Facts, conclude, first_error
from ..runs.status import run_spec
from ..schemas.rundir import ExitFile, RunDir
from ..schemas.states import RUN_TRANSITIONS, TERMINAL_RUN_STATES, RunState
from ..settings import Settings
from .identity import kill_marked, send
from .ledger import import_processes, import_spool, undelivered
from .process import ProcessLauncher, owned

log = logging.getLogger(__name__)

INTERVAL_S = 0.5


class Follower:
    """A thread. `stop` ends the following, never a run."""

    def __init__(self, settings: Settings, db: Database, launcher: ProcessLauncher, changes: Changes) -> None:
        self._settings = settings
        self._db = db
        self._launcher = launcher
        self._changes = changes
        self._asked: dict[str, float] = {}
        """Run → when its trainer was asked to end, for runs whose supervisor is dead."""
        self._ledger_sizes: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="follower", daemon=True)

    def start(self) -> None:
        """Attach to the runs that an earlier server left, then follow."""
        for run_id, run in self._live():
            try:
                import_processes(self._db, run_id, run)
                self._abandon_unstarted(run_id)
            except (OSError, ValueError):  # one run's broken files must not keep the server from starting
                log.exception("cannot attach to run %s", run_id)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self._launcher.reap()
            try:
                live = self._live()
            except sa.exc.SQLAlchemyError:
                log.exception("cannot read the runs, will try again")
                continue
            for run_id, run in live:
                try:
                    if self._follow(run_id, run):
                        self._changes.notify(run_id)
                except (OSError, ValueError, sa.exc.SQLAlchemyError):  # one run's broken files must not hide the others
                    log.exception("cannot follow run %s, will try again", run_id)

    def _live(self) -> list[tuple[str, RunDir]]:
        """Runs of this data directory: a database may be shared with servers that have others, also on other machines."""
        with self._db.read() as session:
            ids = session.scalars(sa.select(Run.run_id).where(Run.state.not_in(TERMINAL_RUN_STATES))).all()
        runs = [(run_id, RunDir(self._settings.data.runs / run_id)) for run_id in ids]
        return [(run_id, run) for run_id, run in runs if run_id in self._ledger_sizes or run.root.is_dir()]

    def _abandon_unstarted(self, run_id: str) -> None:
        """A run that is only created when a server starts: the one before ended between two steps of starting it."""
        started = bool(owned(self._db, run_id, "supervisor"))
        with self._db.write() as session:
            run = session.get_one(Run, run_id)
            if run.state is RunState.CREATED and started:
                run.state, run.started = RunState.STARTING, time.time()
            elif run.state is RunState.CREATED:
                reason = "the server ended before it could start the run"
                _close(run, Conclusion(RunState.FAILED, reason, f"{reason}: start it again"))

    def _follow(self, run_id: str, run: RunDir) -> bool:
        """True when the record changed."""
        with self._db.read() as session:
            state = session.get_one(Run, run_id).state
        if state is RunState.CREATED:
            return False  # a request of this server is starting it
        self._read_ledger(run_id, run)
        if run.exit_file.exists():
            return self._conclude(run_id, run, ExitFile.model_validate_json(run.exit_file.read_bytes()))
        moved = run.run_file.exists() and run.load().server_url != self._settings.url and import_spool(self._db, run_id, run) > 0
        supervisors = owned(self._db, run_id, "supervisor")
        if not supervisors:
            if not owned(self._db, run_id, "trainer"):
                # The supervisor writes the exit file as its last act: it may have come between the two looks.
                exit = ExitFile.model_validate_json(run.exit_file.read_bytes()) if run.exit_file.exists() else None
                return self._conclude(run_id, run, exit)
            if state is RunState.STOPPING:
                self._end_orphan(run_id)
        elif state is RunState.STOPPING:
            for supervisor in supervisors:
                send(supervisor, signal.SIGTERM)  # again is no harm: it only notes that it was asked
        return self._watch_stall(run_id, run) or moved

    def _read_ledger(self, run_id: str, run: RunDir) -> None:
        size = run.processes_file.stat().st_size if run.processes_file.exists() else 0
        if self._ledger_sizes.get(run_id) != size:
            import_processes(self._db, run_id, run)
            self._ledger_sizes[run_id] = size

    def _end_orphan(self, run_id: str) -> None:
        """What the supervisor would do: ask the trainer's group, then make it."""
        asked = self._asked.setdefault(run_id, time.monotonic())
        patient = time.monotonic() - asked < self._settings.stop_grace_s
        for trainer in owned(self._db, run_id, "trainer"):
            send(trainer, signal.SIGTERM if patient else signal.SIGKILL, group=True)

    def _conclude(self, run_id: str, run: RunDir, exit: ExitFile | None) -> bool:
        kill_marked(run_id)  # nothing unless the supervisor died before it could clean up
        import_spool(self._db, run_id, run)
        with self._db.write() as session:
            row = session.scalars(sa.select(Run).where(Run.run_id == run_id).with_for_update()).one()
            steps = session.scalar(sa.select(sa.func.count()).select_from(StepDone).where(StepDone.run_id == run_id)) or 0
            conclusion = conclude(
                Facts(
                    exit=exit,
                    stop_requested=row.state is RunState.STOPPING,
                    reported=row.reported,
                    steps_done=steps,
                    steps_expected=row.steps_expected,
                    final_evaluation=session.get(EvaluationDone, (run_id, row.steps_expected)) is not None,
                    first_error=first_error(run.logs / "trainer.log"),
                )
            )
            _close(row, conclusion)
        log.info("run %s: %s %s", run_id, conclusion.state, conclusion.problem)
        return True

    def _watch_stall(self, run_id: str, run: RunDir) -> bool:
        """Nothing arrived for `monitors.stall_s`: the run is stalled until the next event."""
        with self._db.read() as session:
            row = session.get_one(Run, run_id)
            patience_s = run_spec(session, row).monitors.stall_s
            if RunState.STALLED not in RUN_TRANSITIONS[row.state] or _quiet_s(row) <= patience_s:
                return False
        kept = undelivered(self._db, run_id, run)
        with self._db.write() as session:
            row = session.scalars(sa.select(Run).where(Run.run_id == run_id).with_for_update()).one()
            stalled = RunState.STALLED in RUN_TRANSITIONS[row.state] and _quiet_s(row) > patience_s
            if stalled:
                row.state, row.reason = RunState.STALLED, f"nothing was reported for {_quiet_s(row):.0f} s: {_why_quiet(kept)}"
            return stalled


def _why_quiet(kept: int) -> str:
    """What to look at. `kept`: events that wait on disk."""
    if kept:
        return f"{kept} events wait on disk, so the network between the trainer and this server may be cut (logs/verl.log)"
    return "its processes are there but say nothing: see trainer.log and logs/verl.log"


def _quiet_s(row: Run) -> float:
    return time.time() - max(filter(None, (row.last_event, row.started, row.created)))


def _close(row: Run, conclusion: Conclusion) -> None:
    row.state, row.reason, row.problem, row.finished = conclusion.state, conclusion.reason, conclusion.problem, time.time()
