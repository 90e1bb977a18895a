"""Second verdicts and stage times as queries, on every database."""

from __future__ import annotations

from typing import Any

import pytest

from server.db import Database
from server.db.models import PlanRow, Run
from server.events import ingest
from server.runs.regrades import archived_trials, regrade_report, regraded_points, regrades_of
from server.runs.stages import stage_shares, start_trend
from server.schemas.events import Event
from server.schemas.stages import Part
from server.schemas.states import Phase, RunState

SCORED = {"kind": "scored", "termination": "completed"}
FAILED = {"kind": "failed", "stage": "verifier"}
FIRST: dict[str, dict[str, Any]] = {
    "a": SCORED | {"reward": 1},
    "b": SCORED | {"reward": 0},
    "c": FAILED | {"cause": "verifier"},
    "d": FAILED | {"cause": "engine"},
}


@pytest.fixture
def run(db: Database) -> str:
    with db.write() as session:
        session.add(PlanRow(digest="d", spec={}, provenance={}, summary="", created=0))
        session.flush()
        session.add(Run(run_id="r", name="r", digest="d", state=RunState.RUNNING, token_sha256="", steps_expected=1, created=0))
    group = {"type": "group", "group_id": "g", "step": 2, "phase": "train", "task": "t", "harness": "h", "size": 4}
    bodies: list[dict[str, Any]] = [group]
    for sample, (trial, outcome) in enumerate(FIRST.items()):
        bodies.append({"type": "trial", "trial_id": trial, "state": "queued", "stage": "queued", "group_id": "g", "sample": sample})
        bodies.append({"type": "trial", "trial_id": trial, "state": "running", "stage": "sandbox_setup"})
        bodies.append({"type": "archive", "trial_id": trial, "path": f"trials/{trial}/diff", "size": 2, "sha256": "0"})
        bodies.append({"type": "outcome", "trial_id": trial, "outcome": outcome})
    send(db, "trainer", bodies)
    return "r"


def send(db: Database, source: str, bodies: list[dict[str, Any]], at: float = 1000.0) -> None:
    events = [Event.model_validate({"source": source, "seq": n, "time": at + n, "body": body}) for n, body in enumerate(bodies, 1)]
    assert ingest(db, "r", events) == len(bodies)


def again(trial: str, reward: int, inputs: str = "x", verifier: str = "separate") -> dict[str, Any]:
    return {"type": "regrade", "trial_id": trial, "verifier": verifier, "inputs": inputs, "outcome": SCORED | {"reward": reward}}


def test_what_can_be_judged_again(db: Database, run: str) -> None:
    with db.read() as session:
        assert [trial.trial_id for trial in archived_trials(session, run, [])] == ["a", "b", "c"]  # the engine's failure is no work
        assert archived_trials(session, run, [1]) == []


def test_the_verdict_said_last_counts_and_the_first_stays(db: Database, run: str) -> None:
    send(db, "regrade", [again("a", 1), again("b", 1), again("c", 1), again("b", 0, "y"), again("b", 1), again("a", 0, verifier="shared")])
    with db.read() as session:
        report = regrade_report(session, run, "separate")
        assert (report.regraded, report.compared, report.agreed, report.agreement) == (3, 2, 1, 0.5)
        assert [change.trial_id for change in report.changed] == ["b"] and [change.trial_id for change in report.newly_graded] == ["c"]
        assert regrade_report(session, run, "shared").agreement == 0.0
        point = regraded_points(session, run, Phase.TRAIN)[2]
        assert (point.value, point.n) == (1.0, 3)  # a, b and c; the engine's failure is in neither part
        assert [(verifier, verdict.reward) for verifier, _, verdict in regrades_of(session, run, "b")] == [("separate", 1), ("separate", 0)]
        assert regraded_points(session, run, Phase.EVAL) == {}


def test_nothing_regraded_is_nothing_to_show(db: Database, run: str) -> None:
    with db.read() as session:
        report = regrade_report(session, run, "separate")
        assert (report.regraded, report.agreement, report.changed) == (0, None, [])
        assert regraded_points(session, run, Phase.TRAIN) == {}


def test_a_regrade_of_an_unknown_trial_is_a_problem_of_the_event(db: Database, run: str) -> None:
    send(db, "regrade", [again("nobody", 1)])
    with db.read() as session:
        assert regrade_report(session, run, "separate").regraded == 0


def test_time_goes_to_parts_and_the_rest_is_other(db: Database, run: str) -> None:
    """Each of the four trials ran for two seconds by the clock of the events."""
    timings = [("a", "sandbox_setup", 1.0), ("a", "agent", 2.0), ("b", "verifier", 0.5), ("b", "queued", 50.0)]
    send(db, "runner", [{"type": "stage_timing", "trial_id": t, "stage": s, "started": 10.0, "finished": 10.0 + d} for t, s, d in timings])
    with db.read() as session:
        shares = {share.part: share.seconds for share in stage_shares(session, run)}
        assert shares == {
            Part.SANDBOX_SETUP: 0.25,
            Part.AGENT_SETUP: 0.0,
            Part.AGENT: 0.5,
            Part.VERIFICATION: 0.125,
            Part.OTHER: 1.125,
        }
        assert start_trend(session, run) == [(2, 1.0)]


def test_time_of_lost_steps_is_nobodys(db: Database, run: str) -> None:
    """What was under way when the trainer died ends when another goes on, perhaps hours later."""
    under_way = {"type": "trial", "trial_id": "e", "state": "queued", "stage": "queued", "group_id": "g", "sample": 4}
    send(db, "another", [under_way, under_way | {"state": "running"}, {"type": "resumed", "step": 1, "attempt": 2}], at=9000)
    with db.read() as session:
        assert stage_shares(session, run) == [] and start_trend(session, run) == []
