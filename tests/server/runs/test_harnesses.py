"""A mixed run is shown by harness; a run in one harness is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugin import show
from server.db import Database
from server.db.models import PlanRow, Run
from server.events import ingest
from server.runs.harnesses import harness_rows
from server.runs.status import run_status
from server.schemas.events import Event
from server.schemas.states import RunState
from server.spec import resolve

SOLVED = {"kind": "scored", "reward": 1, "termination": "completed"}
CAPPED = {"kind": "scored", "reward": 0, "termination": "max_turns"}
FAILED = {"kind": "failed", "stage": "agent", "cause": "agent_timeout"}


def group(name: str, harness: str, step: int, outcomes: list[dict[str, Any]], phase: str = "train") -> list[dict[str, Any]]:
    body = {"type": "group", "group_id": name, "step": step, "phase": phase, "task": "t", "harness": harness, "size": len(outcomes)}
    trials = [
        {"type": "trial", "trial_id": f"{name}-{i}", "state": "queued", "stage": "queued", "group_id": name, "sample": i}
        for i in range(len(outcomes))
    ]
    return [body, *trials, *({"type": "outcome", "trial_id": f"{name}-{i}", "outcome": o} for i, o in enumerate(outcomes))]


@pytest.fixture
def db(tmp_path: Path) -> Database:
    db = Database(f"sqlite:///{tmp_path}/db")
    db.migrate()
    spec = resolve({"extends": "local"}, {}).spec.model_dump(mode="json")
    with db.write() as session:
        session.add(PlanRow(digest="d", spec=spec, provenance={}, summary="", created=0))
        session.flush()
        row = {"name": "", "digest": "d", "state": RunState.RUNNING, "token_sha256": "", "steps_expected": 2, "created": 0.0}
        session.add_all(Run(run_id=name, **row) for name in ("mixed", "plain"))
    return db


def report(db: Database, run: str, bodies: list[dict[str, Any]]) -> None:
    ingest(db, run, [Event.model_validate({"source": "t", "seq": n, "time": float(n), "body": body}) for n, body in enumerate(bodies, 1)])


def test_each_harness_has_its_own_figures(db: Database) -> None:
    metrics = {"lego/fidelity/codex/mean_abs": 2e-5, "lego/harness/codex/turns/mean": 3.5}
    report(
        db,
        "mixed",
        [
            *group("e0", "codex", 0, [SOLVED, FAILED], phase="eval"),
            *group("s1", "codex", 1, [SOLVED, CAPPED, FAILED]),
            *group("s1b", "claude-code", 1, [CAPPED, CAPPED]),
            {"type": "step", "step": 1, "metrics": metrics},
            *group("s2", "codex", 2, [SOLVED, SOLVED]),
        ],
    )
    report(db, "plain", group("s1", "codex", 1, [SOLVED]))
    with db.read() as session:
        claude, codex = harness_rows(session, "mixed")
        assert (codex.groups, codex.trials, codex.failed, codex.fidelity, codex.turns) == (3, 7, 2, 2e-5, 3.5)
        assert codex.outcomes == {"agent_timeout": 2, "completed": 4, "max_turns": 1}
        assert [(point.step, point.value, point.n) for point in codex.train_reward] == [(1, 0.5, 2), (2, 1.0, 2)]
        assert [(point.step, point.value, point.n) for point in codex.held_out] == [(0, 0.5, 2)], "a failed trial is not resolved"
        assert (claude.harness, claude.trials, claude.held_out, claude.fidelity) == ("claude-code", 2, [], None)
        assert harness_rows(session, "plain") == []
        status = run_status(session, "mixed")
    assert status is not None
    assert "  in codex: 3 groups, 7 trials, 2 failed; training 0.50 → 1.00; held-out 0.50; log-probs differ by 2.0e-05; " in "\n".join(
        show.status(status)
    )
