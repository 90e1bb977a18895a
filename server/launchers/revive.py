"""Runs in a cluster outlive this machine's processes: after a restart of the machine, or of the pod that the server runs in, each gets a
new supervisor, whose stand-in for the trainer finds its job again."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from ..db import Database
from ..db.models import Run
from ..schemas.rundir import RunDir
from ..schemas.states import TERMINAL_RUN_STATES, RunState
from ..settings import Settings
from .ledger import import_processes
from .process import CannotLaunch, ProcessLauncher, owned
from .supervisor import LaunchFile

log = logging.getLogger(__name__)


def revive(settings: Settings, db: Database, launcher: ProcessLauncher) -> None:
    """Call before anything follows the runs: one without processes would be taken for lost."""
    with db.read() as session:
        gone = (*TERMINAL_RUN_STATES, RunState.CREATED)
        ids = session.scalars(sa.select(Run.run_id).where(Run.state.not_in(gone))).all()
    for run_id in ids:
        run = RunDir(settings.data.runs / run_id)
        try:
            if (
                not run.launch_file.exists()
                or LaunchFile.model_validate_json(run.launch_file.read_bytes()).runner
                or run.exit_file.exists()
            ):
                continue
            import_processes(db, run_id, run)
            if not owned(db, run_id, "supervisor") and not owned(db, run_id, "trainer"):
                launcher.spawn(run_id)
                log.info("run %s: its supervisor is gone and its job is in a cluster: following it again", run_id)
        except (OSError, ValueError, CannotLaunch):  # one run's broken files must not keep the server from starting
            log.exception("cannot follow run %s again", run_id)
