"""The closed loop, whole and real: `rl demo` learns, and survives the loss of its server and of its runner."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
import sqlalchemy as sa

from server.db.models import EventRow, Group, Metric, ProcessRow, Run, StepDone, Trial
from server.schemas.datadir import DataDir, ServerFile
from server.schemas.rundir import RunDir
from server.schemas.states import RunState, TrialState
from tests.support.whole import data, last_json, record, rl, until

__all__ = ["data"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FIGURES = [
    *("run", "steps", "solve_rate_first", "solve_rate_last", "p_value", "trials", "failed"),
    *("sampled_tokens", "trained_tokens", "zero_advantage_tokens", "pearson", "startup_s", "wall_s"),
]
SMALL = "trainer.steps=3", "trainer.evaluation.rollouts=16", "rollout.tasks_per_step=4"


def test_the_demo_learns_and_accounts_for_every_token(data: DataDir) -> None:
    done = rl(data, "demo", "--json", "--stop-server")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = last_json(done.stdout)
    assert list(figures) == FIGURES
    assert figures["p_value"] < 0.05 and figures["solve_rate_last"] > figures["solve_rate_first"]  # type: ignore[operator]
    assert figures["pearson"] >= 0.999  # type: ignore[operator]
    with record(data).read() as session:
        run = session.scalars(sa.select(Run)).one()
        assert run.state is RunState.SUCCEEDED and run.steps_expected == figures["steps"]
        assert session.scalar(sa.select(sa.func.count()).select_from(Trial)) == figures["trials"]
        assert set(session.scalars(sa.select(Trial.state))) <= {TrialState.SCORED, TrialState.FAILED}
        sums = session.execute(sa.select(Metric.key, sa.func.sum(Metric.value)).where(Metric.key.like("lego/%")).group_by(Metric.key))
        total = {key: int(value or 0) for key, value in sums}
    excluded = sum(value for key, value in total.items() if key.startswith("lego/excluded_tokens/"))
    assert total["lego/sampled_tokens"] == total["lego/trained_tokens"] + excluded
    assert (figures["sampled_tokens"], figures["trained_tokens"]) == (total["lego/sampled_tokens"], total["lego/trained_tokens"])
    weights = RunDir(data.runs / str(figures["run"])).checkpoints
    assert list(weights.rglob("model.safetensors")), "the final weights were not saved"


def test_a_killed_server_loses_and_doubles_nothing(data: DataDir) -> None:
    run_id = start(data, *SMALL)
    until(lambda: trials(data, run_id)[TrialState.SCORED] >= 20, "twenty scored trials")
    os.kill(ServerFile.model_validate_json(data.server_file.read_bytes()).pid, signal.SIGKILL)
    until(lambda: steps_reported(data, run_id) >= 2, "two steps without a server")
    assert rl(data, "up", "--port", "0").returncode == 0
    followed = rl(data, "status", run_id, "--follow")
    assert followed.returncode == 0, followed.stdout
    with record(data).read() as session:
        assert session.get_one(Run, run_id).state is RunState.SUCCEEDED
        assert session.scalar(sa.select(sa.func.count()).select_from(StepDone)) == 3
        for source in ("trainer", "runner"):
            seqs = session.scalars(sa.select(EventRow.seq).where(EventRow.source == source).order_by(EventRow.seq)).all()
            assert list(seqs) == list(range(1, len(seqs) + 1))
        assert not session.scalars(sa.select(EventRow.problem).where(EventRow.problem.is_not(None))).all()
    assert sum(trials(data, run_id).values()) == 3 * 4 * 8 + 2 * 16


def test_a_killed_runner_fails_its_trials_and_the_run_goes_on(data: DataDir) -> None:
    run_id = start(data, *SMALL, "monitors.failed_share=1.0")
    until(lambda: training_trials(data, run_id) >= 10, "ten scored training trials")
    with record(data).read() as session:
        runner = session.scalars(sa.select(ProcessRow).where(ProcessRow.run_id == run_id, ProcessRow.role == "runner")).one()
    os.kill(runner.pid, signal.SIGKILL)
    followed = rl(data, "status", run_id, "--follow")
    assert followed.returncode == 0, followed.stdout
    with record(data).read() as session:
        causes = Counter(session.scalars(sa.select(Trial.cause).where(Trial.state == TrialState.FAILED)))
        roles = session.scalars(sa.select(ProcessRow.role).where(ProcessRow.run_id == run_id)).all()
    assert set(causes) == {"runner_lost"} and roles.count("runner") == 2
    assert sum(trials(data, run_id).values()) == 3 * 4 * 8 + 2 * 16


def start(data: DataDir, *settings: str) -> str:
    assert rl(data, "harness", "install", "mini-swe-agent").returncode == 0
    assert rl(data, "up", "--port", "0").returncode == 0
    started = rl(data, "run", "local", "--yes", *(word for setting in settings for word in ("--set", setting)))
    assert started.returncode == 0, started.stdout + started.stderr
    with record(data).read() as session:
        return session.scalars(sa.select(Run.run_id)).one()


def trials(data: DataDir, run_id: str) -> Counter[TrialState]:
    with record(data).read() as session:
        return Counter(session.scalars(sa.select(Trial.state).where(Trial.run_id == run_id)))


def training_trials(data: DataDir, run_id: str) -> int:
    with record(data).read() as session:
        scored = sa.select(sa.func.count()).select_from(Trial).join(Group, Group.group_id == Trial.group_id)
        return session.scalar(scored.where(Trial.run_id == run_id, Group.phase == "train", Trial.state == TrialState.SCORED)) or 0


def steps_reported(data: DataDir, run_id: str) -> int:
    """Steps in the trainer's spool, which it writes whether or not a server listens."""
    spool = RunDir(data.runs / run_id).spool / "trainer.jsonl"
    return spool.read_text().count('"type":"step"')
