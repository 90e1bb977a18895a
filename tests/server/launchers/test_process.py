from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.launchers.identity import OwnedProcess, identify, is_alive
from server.launchers.supervisor import LaunchFile
from server.schemas.rundir import ExitFile, RunDir
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


def test_a_killed_trainer_with_a_checkpoint_is_started_again(server: Server) -> None:
    """What the dead trainer reported behind its checkpoint is superseded: no curve and no count holds it, but it can be looked at."""
    run_id = server.start_run("free-dies")
    status = server.end_of(run_id)
    assert (status.state, status.problem, status.steps_done) == (RunState.SUCCEEDED, "", 3)
    assert [(point.step, point.value, point.n) for point in status.train_reward] == [(1, 0.5, 2), (2, 0.5, 2), (3, 0.5, 2)]
    assert (status.trials, status.failed, status.outcomes) == (6, 0, {"completed": 6})
    steps = server.http.get(f"/api/runs/{run_id}/steps").json()
    assert [step["metrics"]["actor/grad_norm"] for step in steps] == pytest.approx([0.1, 0.2, 0.3])
    exit = ExitFile.model_validate_json(server.dir(run_id).exit_file.read_bytes())
    assert (exit.trainer, exit.trainer_restarts) == (0, 1)
    lost = {trial["trial_id"]: trial for trial in server.http.get(f"/api/runs/{run_id}/trials?phase=superseded").json()}
    assert {name: trial["outcome"]["kind"] for name, trial in lost.items()} == {"lost-0": "scored", "lost-1": "failed"}
    assert lost["lost-1"]["outcome"]["cause"] == "cancelled"
    assert server.processes(run_id) == []


def test_a_trainer_that_dies_every_time_fails_the_run(server: Server) -> None:
    run_id = server.start_run("free-dies-always", **{"trainer.checkpoint.restarts": 2})
    status = server.end_of(run_id)
    assert (status.state, status.steps_done) == (RunState.FAILED, 1)
    assert ExitFile.model_validate_json(server.dir(run_id).exit_file.read_bytes()).trainer_restarts == 2


def test_a_request_that_is_sent_again_starts_no_second_run(server: Server) -> None:
    request = {"document": {"extends": "local"}, "overrides": {"reporting.name": "free-again", "trainer.steps": 3}}
    start = {"digest": server.http.post("/api/plans", json=request).json()["digest"]}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.http.post("/api/runs", json=start), range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    (run_id,) = {answer.json()["run_id"] for answer in answers}
    server.end_of(run_id)
    assert server.http.post("/api/runs", json=start).json()["run_id"] == run_id
    server.http.post("/api/plans", json=request)
    another = server.http.post("/api/runs", json=start).json()["run_id"]
    assert another != run_id, "shown again, a plan may start again"
    server.end_of(another)


def test_a_run_that_cannot_be_written_leaves_nothing(server: Server) -> None:
    """The disk is full: here, the directory of runs is a file."""
    before = server.http.get("/api/runs").json()
    kept = server.data.runs.rename(server.data.root / "kept")
    server.data.runs.touch()
    try:
        plan = server.http.post("/api/plans", json={"document": {"extends": "local"}, "overrides": {"reporting.name": "free-nowhere"}})
        answer = server.http.post("/api/runs", json={"digest": plan.json()["digest"]})
    finally:
        server.data.runs.unlink()
        kept.rename(server.data.runs)
    assert (answer.status_code, answer.json()["detail"].endswith(": Not a directory")) == (503, True)
    assert server.http.get("/api/runs").json() == before


def test_a_trainer_that_cannot_be_executed_is_named_and_its_runner_ended(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    runner = [sys.executable, "-c", "import time; time.sleep(600)"]
    launch = LaunchFile(run_id="no-python", runner=runner, trainer=["/no/such/python"], stop_grace_s=1)
    run.launch_file.write_text(launch.model_dump_json())
    subprocess.run(
        [sys.executable, "-P", "-m", "server.launchers.supervisor", "--run-dir", tmp_path], check=True, stderr=subprocess.DEVNULL
    )
    exit = ExitFile.model_validate_json(run.exit_file.read_bytes())
    assert exit.reason == "a process cannot be run: [Errno 2] No such file or directory: '/no/such/python'"
    owned = [OwnedProcess.model_validate_json(line) for line in run.processes_file.read_text().splitlines()]
    assert [process.role for process in owned] == ["supervisor", "runner"]
    assert not any(map(is_alive, owned))
