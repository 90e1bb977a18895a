"""Checks as jobs: they outlast a request, so they run in a thread and leave their report in the record."""

from __future__ import annotations

import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from ..changes import Changes
from ..db import Database
from ..db.models import CheckRow
from ..schemas.api import CheckRequest
from ..schemas.checks import Check, CheckReport, Level
from ..settings import Settings
from ..spec import SpecError, resolve
from .cluster import CLUSTER_RULES
from .gather import gather
from .rooms import Rooms
from .rules import RULES, error, ok

log = logging.getLogger(__name__)


def run_checks(settings: Settings, request: CheckRequest, rooms: Rooms) -> CheckReport:
    """All checks of one spec. A spec that is wrong is reported like everything else; then nothing more can be looked at."""
    try:
        resolved = resolve(request.document, request.overrides, request.base)
    except SpecError as wrong:
        return make_report(wrong.problems)
    facts = gather(settings, resolved.spec, rooms, skip_slow=request.skip_slow)
    rules = CLUSTER_RULES if resolved.spec.trainer.launcher == "kubernetes" else RULES
    found = [check for rule in rules for check in rule(resolved.spec, facts)]
    return make_report([ok("spec", "spec", f"the spec is valid (digest {resolved.digest[:12]})"), *found])


def make_report(checks: list[Check]) -> CheckReport:
    counts = {level: sum(check.level is level for check in checks) for level in Level}
    errors = [check for check in checks if check.level is Level.ERROR]
    parts = [f"{count} {level}" for level, count in counts.items() if count]
    summary = f"{len(checks)} checks: {', '.join(parts)}" + (f". First: {errors[0].where}: {errors[0].message}" if errors else "")
    return CheckReport(ok=not errors, summary=summary, checks=checks)


class CheckService:
    """Owns the threads of running checks."""

    def __init__(self, settings: Settings, db: Database, changes: Changes) -> None:
        self._settings = settings
        self._db = db
        self._changes = changes
        self._rooms = Rooms()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="checks")

    def recover(self) -> None:
        """Jobs of a server that is gone have no report and will get none."""
        report = make_report([error("check", "server", "the server ended while the checks ran", "run them again")])
        with self._db.write() as session:
            session.execute(sa.update(CheckRow).where(CheckRow.report.is_(None)).values(report=report.model_dump(mode="json")))

    def start(self, request: CheckRequest) -> str:
        check_id = secrets.token_hex(8)
        with self._db.write() as session:
            session.add(CheckRow(check_id=check_id, request=request.model_dump(mode="json"), created=time.time()))
        self._pool.submit(self._run, check_id, request)
        return check_id

    def close(self) -> None:
        """Running checks end now; their reports are written by the next server's `recover`."""
        self._rooms.close()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, check_id: str, request: CheckRequest) -> None:
        try:
            report = run_checks(self._settings, request, self._rooms)
        except Exception as fault:
            log.exception("check %s failed", check_id)
            report = make_report([error("check", "server", f"the checks themselves failed: {fault!r}", "see server.log")])
        with self._db.write() as session:
            session.get_one(CheckRow, check_id).report = report.model_dump(mode="json")
        self._changes.notify(check_id)
