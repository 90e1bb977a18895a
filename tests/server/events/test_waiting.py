"""What a run waits for, as its launcher says it."""

from __future__ import annotations

import pytest

from server.db import Database
from server.db.models import Run
from server.events import ingest
from server.schemas.states import RunState

from .test_ingest import make_events, make_run


def reason_after(db: Database, state: RunState, *reasons: str) -> str:
    run_id = make_run(db)
    with db.write() as session:
        session.get_one(Run, run_id).state = state
    ingest(db, run_id, make_events("launcher", [{"type": "waiting", "reason": reason} for reason in reasons]))
    with db.read() as session:
        run = session.get_one(Run, run_id)
        assert run.state is state
        return run.reason


@pytest.mark.parametrize("state", [RunState.STARTING, RunState.RUNNING])
def test_the_last_reason_counts_and_an_empty_one_ends_it(db: Database, state: RunState) -> None:
    assert reason_after(db, state, "0 of 3 pods", "1 of 3 pods\x00") == "1 of 3 pods\N{REPLACEMENT CHARACTER}"


def test_a_run_that_waits_no_more_has_no_reason(db: Database) -> None:
    assert reason_after(db, RunState.RUNNING, "0 of 3 pods", "") == ""


@pytest.mark.parametrize("state", [RunState.STOPPING, RunState.SUCCEEDED, RunState.FAILED])
def test_a_run_that_ends_or_has_ended_keeps_its_own_reason(db: Database, state: RunState) -> None:
    assert reason_after(db, state, "0 of 3 pods") == ""
