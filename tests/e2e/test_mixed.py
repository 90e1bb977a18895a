"""Runs in three harnesses at once on the embedded default: three pinned ones, and a mix with one of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from server.db.models import Group, Metric, Run, Trial
from server.runs.harnesses import harness_rows
from server.schemas.capture import CaptureRecord
from server.schemas.datadir import DataDir
from server.schemas.states import RunState
from tests.support.whole import data, record, rl

__all__ = ["data"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = {"mini-swe-agent", "mini-plain", "loop"}


PINNED = {"mini-swe-agent", "claude-code", "codex"}


@pytest.mark.claude
def test_three_pinned_harnesses_learn_in_one_run(data: DataDir) -> None:
    """Three programs, three wires, one policy: groups never mix harnesses, and each has figures of its own."""
    assert rl(data, "harness", "install", *PINNED).returncode == 0
    assert rl(data, "up", "--port", "0").returncode == 0
    small = {"trainer.steps": 2, "rollout.tasks_per_step": 6, "rollout.group_size": 4, "trainer.evaluation.rollouts": 12}
    settings = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    done = rl(data, "run", "local-mixed", *settings, "--yes", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    with record(data).read() as session:
        run = session.scalars(sa.select(Run)).one()
        assert run.state is RunState.SUCCEEDED
        rows = {row.harness: row for row in harness_rows(session, run.run_id)}
        groups = {group.group_id: group for group in session.scalars(sa.select(Group))}
        trials = session.scalars(sa.select(Trial)).all()
    assert set(rows) == PINNED == {group.harness for group in groups.values() if group.phase == "train"}
    assert sum(row.failed for row in rows.values()) == 0, {name: row.outcomes for name, row in rows.items()}
    for row in rows.values():
        assert sum(point.value for point in row.train_reward) > 0, "the policy solves some in every harness"
        assert row.fidelity is not None and row.fidelity < 0.05
    run_dir = data.runs / run.run_id
    for trial in trials:
        seen = CaptureRecord.model_validate_json((run_dir / "captures" / f"{trial.trial_id}.json").read_bytes())
        assert seen.harness == groups[str(trial.group_id)].harness and not seen.violations
        assert seen.log is not None and (seen.log.malformed, seen.log.unknown) == (0, 0), "each log is of the pinned version"
    shown = rl(data, "status", run.run_id)
    assert all(f"  in {name}: " in shown.stdout for name in PINNED), shown.stdout


@pytest.mark.parametrize("by", ["group", "trajectory"])
def test_a_mixed_run_learns_and_reports_each_harness(data: DataDir, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    assert rl(data, "harness", "install", "mini-swe-agent").returncode == 0
    assert rl(data, "up", "--port", "0").returncode == 0
    done = rl(data, "run", str(EXAMPLES / "mixed.yaml"), "--set", f"rollout.harness_by={by}", "--yes", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    with record(data).read() as session:
        assert session.scalars(sa.select(Run)).one().state is RunState.SUCCEEDED
        train = session.scalars(sa.select(Group).where(Group.phase == "train")).all()
        assert {group.harness for group in train} == NAMES
        assert sum(group.size for group in train) == 2 * 6 * 4
        assert (len(train) == 12) is (by == "group")
        assert set(session.scalars(sa.select(Group.harness).where(Group.phase == "eval"))) == {"mini-swe-agent"}
        sums = session.execute(sa.select(Metric.key, sa.func.sum(Metric.value)).where(Metric.key.like("lego/%")).group_by(Metric.key))
        total = {key: int(value or 0) for key, value in sums}
    assert {name: total[f"lego/harness/{name}/trials"] for name in NAMES} == {
        name: sum(group.size for group in train if group.harness == name) for name in NAMES
    }
    learned = {f"lego/harness/{name}/reward/mean" for name in NAMES} | {f"lego/fidelity/{name}/mean_abs" for name in NAMES}
    assert learned <= total.keys(), {key: value for key, value in total.items() if key.startswith("lego/harness/")}
    excluded = sum(value for key, value in total.items() if key.startswith("lego/excluded_tokens/"))
    assert total["lego/sampled_tokens"] == total["lego/trained_tokens"] + excluded
