from __future__ import annotations

import os
import signal

import pytest

from server.launchers.identity import identify
from server.schemas.states import RunState

from ..waiting import until
from .conftest import Server


def stray_of(server: Server, run_id: str) -> int:
    file = server.dir(run_id).root / "stray"
    return int(until(lambda: file.exists() and file.read_text()))


def test_a_run_succeeds_with_every_step_and_the_last_evaluation(server: Server) -> None:
    run_id = server.start_run("free")
    status = server.end_of(run_id)
    assert (status.state, status.problem, status.steps_done, status.steps_expected) == (RunState.SUCCEEDED, "", 3, 3)
    assert [(point.step, point.value, point.n) for point in status.held_out] == [(0, 0.25, 4), (3, 0.75, 4)]
    assert [(point.step, point.value, point.n) for point in status.train_reward] == [(1, 0.5, 2), (2, 0.5, 2), (3, 0.5, 2)]
    assert status.outcomes == {"completed": 6}
    assert status.last_metrics["actor/grad_norm"] == 0.1 * 3
    assert status.summary == "succeeded, 3 of 3 steps; held-out solve rate 0.25 → 0.75"


def test_nothing_is_left_when_a_run_has_ended(server: Server) -> None:
    run_id = server.start_run("free")
    server.end_of(run_id)
    assert server.processes(run_id) == []
    assert identify(stray_of(server, run_id)) is None


def test_the_run_file_is_private(server: Server) -> None:
    run_id = server.start_run("free")
    assert server.dir(run_id).run_file.stat().st_mode & 0o777 == 0o600
    server.end_of(run_id)


def test_a_wrong_exit_code_is_a_failure_that_names_the_first_error(server: Server) -> None:
    run_id = server.start_run("free-raises")
    status = server.end_of(run_id)
    assert (status.state, status.steps_done) == (RunState.FAILED, 1)
    assert status.problem == "the trainer ended with exit code 3: ValueError: the loss is NaN (trainer.log)"
    assert server.http.get(f"/api/runs/{run_id}/logs/trainer").json()["lines"][-1] == "RuntimeError: worker died"


def test_exit_code_zero_with_too_few_steps_is_a_failure(server: Server) -> None:
    status = server.end_of(server.start_run("free-short"))
    assert (status.state, status.steps_done) == (RunState.FAILED, 1)
    assert status.reason == "the trainer ended without an error after 1 of 3 steps"


@pytest.mark.slow
def test_a_runner_that_never_lives_ends_the_run(server: Server) -> None:
    run_id = server.start_run("no-runner")
    # Five deaths take half a minute of back-off; the reason is what matters here.
    status = server.end_of(run_id)
    assert status.state is RunState.FAILED
    assert status.problem.startswith("the runner died 6 times in a row, last with exit code 1")


def test_a_killed_runner_is_started_again(server: Server) -> None:
    run_id = server.start_run("held")
    (first,) = until(lambda: server.dir(run_id).runner_file.exists() and server.processes(run_id, "runner"))
    boot = server.dir(run_id).runner_file.read_text()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: server.dir(run_id).runner_file.exists() and server.dir(run_id).runner_file.read_text() != boot)
    (server.dir(run_id).root / "go").touch()
    assert server.end_of(run_id).state is RunState.SUCCEEDED


def test_a_stopped_run_is_stopped_and_leaves_nothing(server: Server) -> None:
    run_id = server.start_run("held")
    stray = stray_of(server, run_id)
    assert server.http.post(f"/api/runs/{run_id}/stop").json()["state"] == "stopping"
    status = server.end_of(run_id)
    assert (status.state, status.reason) == (RunState.STOPPED, "stopped by request")
    assert server.processes(run_id) == []
    assert identify(stray) is None
    assert server.http.post(f"/api/runs/{run_id}/stop").json()["state"] == "stopped"


@pytest.mark.slow
def test_silence_stalls_a_run_and_an_event_wakes_it(server: Server) -> None:
    run_id = server.start_run("held", **{"monitors.stall_s": 1})
    assert until(lambda: server.status(run_id).state is RunState.STALLED)
    assert server.status(run_id).reason.startswith("nothing was reported for")
    (server.dir(run_id).root / "go").touch()
    assert server.end_of(run_id).state is RunState.SUCCEEDED


def test_a_run_without_its_supervisor_is_followed_to_its_end(server: Server) -> None:
    run_id = server.start_run("held")
    stray = stray_of(server, run_id)
    (supervisor,) = server.processes(run_id, "supervisor")
    os.kill(supervisor.pid, signal.SIGKILL)
    (server.dir(run_id).root / "go").touch()
    status = server.end_of(run_id)
    assert (status.state, status.steps_done) == (RunState.SUCCEEDED, 3)
    assert server.processes(run_id) == []
    assert identify(stray) is None


@pytest.mark.slow
def test_a_run_without_its_supervisor_can_be_stopped(server: Server) -> None:
    run_id = server.start_run("held")
    stray_of(server, run_id)
    (supervisor,) = server.processes(run_id, "supervisor")
    os.kill(supervisor.pid, signal.SIGKILL)
    server.http.post(f"/api/runs/{run_id}/stop")
    assert server.end_of(run_id).state is RunState.STOPPED
    assert server.processes(run_id) == []


@pytest.mark.slow
def test_a_killed_trainer_fails_the_run(server: Server) -> None:
    run_id = server.start_run("held")
    stray_of(server, run_id)
    (trainer,) = server.processes(run_id, "trainer")
    os.kill(trainer.pid, signal.SIGKILL)
    status = server.end_of(run_id)
    assert status.problem.startswith("the trainer was ended by SIGKILL, perhaps for want of memory")
