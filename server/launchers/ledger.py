"""What a run's processes left on disk, taken over into the record: who they are, and events that never reached the server."""

from __future__ import annotations

import logging
from itertools import batched, islice
from pathlib import Path

import sqlalchemy as sa
from pydantic import ValidationError

from ..db import Database
from ..db.models import EventSource, ProcessRow
from ..events import ingest
from ..schemas.events import Event
from ..schemas.rundir import RunDir
from .identity import OwnedProcess

log = logging.getLogger(__name__)

BATCH = 500


def import_processes(db: Database, run_id: str, run: RunDir) -> None:
    """Lines of processes.jsonl → the ledger; a line that is still being written comes next time."""
    if not run.processes_file.exists():
        return
    text = run.processes_file.read_text(errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    with db.write() as session:
        for line in lines:
            try:
                process = OwnedProcess.model_validate_json(line)
            except ValidationError:
                log.warning("run %s: a line of %s names no process", run_id, run.processes_file.name)  # cut by a full disk
                continue
            session.merge(ProcessRow(run_id=run_id, **process.model_dump()))


def import_spool(db: Database, run_id: str, run: RunDir) -> int:
    """Events that producers wrote down but could not deliver, because the server was away or has moved. Returns how many were stored."""
    return sum(_import_source(db, run_id, file) for file in sorted(run.spool.glob("*.jsonl")))


def undelivered(db: Database, run_id: str, run: RunDir) -> int:
    """How many events of a run are on disk that the record does not have."""
    with db.read() as session:
        stored = {row.source: row.stored for row in session.scalars(sa.select(EventSource).where(EventSource.run_id == run_id))}
    return sum(max(0, file.read_bytes().count(b"\n") - stored.get(file.stem, 0)) for file in run.spool.glob("*.jsonl"))


def _import_source(db: Database, run_id: str, file: Path) -> int:
    with db.read() as session:
        cursor = session.get(EventSource, (run_id, file.stem))
    stored = before = cursor.stored if cursor else 0
    with file.open("rb") as spool:
        # Line n is the event with seq n.
        for lines in batched(islice(spool, stored, None), BATCH):
            try:
                events = [Event.model_validate_json(line) for line in lines if line.endswith(b"\n")]
            except ValidationError as error:
                log.warning("run %s: %s holds a line that is no event: %s", run_id, file.name, error.errors()[0]["msg"])
                break
            stored = ingest(db, run_id, events) if events else stored
    return stored - before
