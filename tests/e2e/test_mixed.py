"""A run in three harnesses at once, one of them of one's own, on the embedded default."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from server.db.models import Group, Metric, Run
from server.schemas.datadir import DataDir
from server.schemas.states import RunState
from tests.support.whole import data, record, rl

__all__ = ["data"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = {"mini-swe-agent", "mini-plain", "loop"}


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
