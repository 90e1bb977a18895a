from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from server.db import Database
from server.db.models import Base, EventRow, Metric, PlanRow, Run, Trial
from server.events import MixedSources, UnknownRun, ingest
from server.schemas.events import Event
from server.schemas.outcome import Stage
from server.schemas.states import RunState, TrialState
from tests.support.examples import examples


def make_run(db: Database, run_id: str = "r1") -> str:
    with db.write() as session:
        session.merge(PlanRow(digest="d", spec={}, provenance={}, summary="", created=0))
        session.flush()
        session.add(
            Run(run_id=run_id, name=run_id, digest="d", state=RunState.STARTING, token_sha256="", steps_expected=2, created=time.time())
        )
    return run_id


def make_events(source: str, bodies: list[dict[str, Any]]) -> list[Event]:
    return [Event.model_validate({"source": source, "seq": n, "time": 100.0 + n, "body": body}) for n, body in enumerate(bodies, 1)]


def scored(reward: int) -> dict[str, Any]:
    return {"kind": "scored", "reward": reward, "termination": "completed"}


def trainer_events() -> list[Event]:
    bodies: list[dict[str, Any]] = [{"type": "run_state", "state": "running"}]
    for n in range(3):
        bodies.append({"type": "group", "group_id": f"g{n}", "step": 1, "phase": "train", "task": f"t{n}", "harness": "mini", "size": 2})
    for n in range(6):
        bodies.append(
            {"type": "trial", "trial_id": f"x{n}", "state": "queued", "stage": "queued", "group_id": f"g{n // 2}", "sample": n % 2}
        )
    for n in range(5):
        failed = {"kind": "failed", "stage": "agent", "cause": "proxy", "detail": "gone\x00", "evidence": ["line"]}
        bodies.append({"type": "outcome", "trial_id": f"x{n}", "outcome": failed if n == 4 else scored(n % 2)})
        bodies.append(
            {"type": "capture", "trial_id": f"x{n}", "path": f"captures/x{n}.json", "size": 3, "sha256": "0", "turns": 2, "branches": 1}
            | {"sampled_tokens": 30, "tool_calls": 2}
        )
    bodies.append({"type": "outcome", "trial_id": "x0", "outcome": scored(1)})
    bodies.append({"type": "step", "step": 1, "metrics": {"actor/lr": 0.1, "actor/grad_norm": float("nan")}})
    bodies.append({"type": "evaluation", "step": 1, "resolved": 3, "executed": 5, "total": 6})
    bodies.append({"type": "finding", "detector": "gate", "title": "low pearson", "step": 1, "evidence": ["step:1"]})
    return make_events("trainer", bodies)


def runner_events() -> list[Event]:
    bodies: list[dict[str, Any]] = [{"type": "log", "name": "runner", "path": "logs/runner.log"}]
    for n in range(6):
        for stage in ("sandbox_setup", "agent"):
            bodies.append({"type": "trial", "trial_id": f"x{n}", "state": "running", "stage": stage})
            bodies.append({"type": "stage_timing", "trial_id": f"x{n}", "stage": stage, "started": 1.0, "finished": 2.0})
        bodies.append({"type": "trial", "trial_id": f"x{n}", "state": "scored", "stage": "done"})
    bodies.append({"type": "trial", "trial_id": "x1", "state": "running", "stage": "agent"})
    return make_events("runner", bodies)


def tables(db: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the events decide, without the server's own clock."""
    found = {}
    with db.engine.connect() as connection:
        for table in Base.metadata.sorted_tables:
            columns = [column for column in table.columns if column.name not in ("last_event", "created")]
            rows = connection.execute(sa.select(*columns).order_by(*table.primary_key.columns))
            found[table.name] = [tuple(map(repr, row)) for row in rows]
    return found


def clear(db: Database) -> None:
    with db.write() as session:
        session.execute(sa.delete(Run))


def test_events_become_rows(db: Database) -> None:
    run = make_run(db)
    assert ingest(db, run, trainer_events()) == len(trainer_events())
    assert ingest(db, run, runner_events()) == len(runner_events())
    with db.read() as session:
        assert session.get_one(Run, run).state is RunState.RUNNING
        solved = session.get_one(Trial, (run, "x1"))
        assert (solved.state, solved.stage, solved.reward, solved.group_id, solved.sample) == (TrialState.SCORED, Stage.DONE, 1, "g0", 1)
        failed = session.get_one(Trial, (run, "x4"))
        assert (failed.state, failed.reward, failed.cause, failed.failed_stage) == (TrialState.FAILED, None, "proxy", "agent")
        # The runner has finished its part of x5, but no outcome was admitted yet.
        waiting = session.get_one(Trial, (run, "x5"))
        assert (waiting.state, waiting.stage) == (TrialState.RUNNING, Stage.DONE)


def test_an_evaluation_takes_no_metric_from_the_step_before_it(db: Database) -> None:
    """It is reported first, and has turns too."""
    run = make_run(db)
    evaluation = {"type": "evaluation", "step": 1, "resolved": 3, "executed": 5, "total": 6, "metrics": {"lego/turns/mean": 9}}
    ingest(db, run, make_events("trainer", [evaluation, {"type": "step", "step": 1, "metrics": {"lego/turns/mean": 4}}]))
    with db.read() as session:
        values = {key: value for key, value in session.execute(sa.select(Metric.key, Metric.value))}
    turns = {"lego/turns/mean": 4, "evaluation/lego/turns/mean": 9}
    assert values == turns | {"evaluation/resolved": 3, "evaluation/executed": 5, "evaluation/total": 6}


def test_what_cannot_be_applied_is_a_problem_of_the_event_alone(db: Database) -> None:
    run = make_run(db)
    ingest(db, run, trainer_events())
    ingest(db, run, runner_events())
    with db.read() as session:
        problems = set(session.scalars(sa.select(EventRow.problem).where(EventRow.problem.is_not(None))))
        assert problems == {"trial x0 has an outcome already", "runner said that trial x1 is scored, it cannot become running"}
        assert session.get_one(Trial, (run, "x0")).reward == 0


def test_a_batch_behind_a_gap_stores_nothing(db: Database) -> None:
    run, events = make_run(db), trainer_events()
    assert ingest(db, run, events[3:]) == 0
    assert ingest(db, run, [*events[:3], *events[5:]]) == 3
    assert ingest(db, run, events[1:]) == len(events)
    with db.read() as session:
        assert session.scalars(sa.select(EventRow.seq).order_by(EventRow.seq)).all() == list(range(1, len(events) + 1))


def test_a_stalled_run_goes_on_with_its_next_event(db: Database) -> None:
    run = make_run(db)
    with db.write() as session:
        session.get_one(Run, run).state = RunState.STALLED
    ingest(db, run, runner_events()[:1])
    with db.read() as session:
        assert session.get_one(Run, run).state is RunState.RUNNING


def test_a_producer_cannot_end_the_run(db: Database) -> None:
    run = make_run(db)
    ingest(db, run, make_events("trainer", [{"type": "run_state", "state": "running"}, {"type": "run_state", "state": "succeeded"}]))
    with db.read() as session:
        row = session.get_one(Run, run)
        assert (row.state, row.reported) == (RunState.RUNNING, "succeeded")


def test_unknown_runs_and_mixed_batches_are_refused(db: Database) -> None:
    run = make_run(db)
    with pytest.raises(UnknownRun):
        ingest(db, "nope", trainer_events())
    with pytest.raises(MixedSources):
        ingest(db, run, [*trainer_events(), *runner_events()])


def test_sources_may_report_at_the_same_time(db: Database) -> None:
    run = make_run(db)

    def deliver(events: list[Event]) -> int:
        return [ingest(db, run, events[n : n + 2]) for n in range(0, len(events), 2)][-1]

    with ThreadPoolExecutor(4) as pool:
        # Twice each: a producer that got no answer sends its batch again while the first one is still being stored.
        stored = list(pool.map(deliver, [trainer_events(), runner_events(), trainer_events(), runner_events()]))
    assert stored == [len(trainer_events()), len(runner_events())] * 2
    with db.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(EventRow)) == len(trainer_events()) + len(runner_events())


@examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_any_interleaving_and_repetition_of_batches_gives_the_same_tables(db: Database, seed: int) -> None:
    clear(db)
    run = make_run(db)
    ingest(db, run, trainer_events())
    ingest(db, run, runner_events())
    expected = tables(db)
    clear(db)
    run = make_run(db)
    rng = random.Random(seed)
    left = {"trainer": trainer_events(), "runner": runner_events()}
    acknowledged = dict.fromkeys(left, 0)
    while any(acknowledged[source] < len(events) for source, events in left.items()):
        source = rng.choice(list(left))
        start = max(0, acknowledged[source] + rng.randint(-5, 3))  # repeated, or behind a gap
        batch = left[source][start : start + rng.randint(1, 9)]
        rng.shuffle(batch)
        if batch:
            stored = ingest(db, run, batch)
            assert stored >= acknowledged[source]
            acknowledged[source] = stored
    assert tables(db) == expected
