"""Sends the spans of finished trials to an OpenTelemetry collector, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time

import sqlalchemy as sa
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from sqlalchemy.orm import Session

from ..db import Database
from ..db.models import CaptureRow, Run, Trial
from ..runs.files import Missing, read_capture, run_dir
from ..runs.trials import trial_detail
from ..schemas.capture import CaptureRecord
from ..schemas.states import TERMINAL_RUN_STATES
from ..settings import Settings
from .spans import TrialSpans

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
SETTLE_S = 5.0
"""Behind an outcome the runner's last timings may still be on their way."""
AFTER_S = 600
"""How long after its end a run is still looked at."""

Key = tuple[str, str]
"""Run and trial."""


class TraceSender:
    """Trials that were over before the server started are not sent again. A collector that is away is tried again; nothing waits for it."""

    def __init__(self, settings: Settings, db: Database, url: str) -> None:
        self._settings, self._db = settings, db
        self._exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=5)
        self._spans = TrialSpans()
        self._sent: set[Key] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="traces", daemon=True)

    def start(self) -> None:
        with self._db.read() as session:
            self._sent = set(_over(session))
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            try:
                self._send()
            except sa.exc.SQLAlchemyError:
                log.exception("cannot read the trials, will try again")

    def _send(self) -> None:
        with self._db.read() as session:
            over = _over(session)
        self._sent &= over.keys()
        for key, finished in over.items():
            if key in self._sent or finished > time.time() - SETTLE_S:
                continue
            if self._stopping.is_set() or not self._send_one(*key):
                return
            self._sent.add(key)

    def _send_one(self, run_id: str, trial_id: str) -> bool:
        with self._db.read() as session:
            trial = trial_detail(session, run_id, trial_id)
            row = session.get(CaptureRow, (run_id, trial_id))
            capture = self._capture(run_id, row) if row is not None else None
        spans = self._spans.spans(run_id, trial, capture) if trial is not None else []
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def _capture(self, run_id: str, row: CaptureRow) -> CaptureRecord | None:
        try:
            return read_capture(run_dir(self._settings, run_id), row)
        except Missing:
            return None  # the trial's page says so; a trace without model calls is still one


def _over(session: Session) -> dict[Key, float]:
    """When trials with an outcome ended, of runs that are under way or have just ended."""
    lately = sa.or_(Run.state.not_in(TERMINAL_RUN_STATES), Run.finished > time.time() - AFTER_S)
    query = sa.select(Trial.run_id, Trial.trial_id, Trial.finished).join(Run, Run.run_id == Trial.run_id)
    found = session.execute(query.where(lately, Trial.kind != "", Trial.finished.is_not(None)).order_by(Trial.finished))
    return {(run, trial): finished or 0.0 for run, trial, finished in found}
