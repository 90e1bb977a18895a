"""The trainer as a job of a real Ray cluster. Trainers that end at once stand for the others: what counts is the way there and back."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.schemas.rundir import RunDir, RunFile, write_atomic
from server.schemas.runspec import Cluster, Data, Harness, Model, RunSpec, Trainer
from tests.trainer.support.fake_server import FakeServer
from trainer.launch import FINAL, TERMINATED, ray_job
from trainer.launch.config import loopback_address
from trainer.launch.environment import settings

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head of its own on loopback, and the address of its Jobs API. It asks everybody for a token, which a user's environment holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield from _head(tmp_path_factory)


def _head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`--block` makes the whole cluster end with the process."""
    port, jobs = free_port(), free_port()
    home = tmp_path_factory.mktemp("r")
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        f"--node-ip-address={loopback_address(secrets.token_hex(8))}",
    ]
    command += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]  # or another head has them
    command += [f"--dashboard-port={jobs}", "--dashboard-host=127.0.0.1", "--num-cpus=2", f"--temp-dir={home}", "--disable-usage-stats"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | settings("cpu")
    with (home / "log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{jobs}"
    deadline = time.monotonic() + 120
    while True:
        try:
            listed(address)
            break
        except httpx.HTTPError:
            assert head.poll() is None and time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.5)
    yield address
    os.killpg(head.pid, signal.SIGKILL)  # its own session
    head.wait(60)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer("events")
    yield server
    server.stop()


def prepare(root: Path, server: FakeServer, jobs: str, model: Path) -> RunDir:
    run = RunDir(root)
    (run.tasks / "train").mkdir(parents=True)
    spec = RunSpec(
        model=Model(path=str(model)),
        harnesses=[Harness(name="h", version="1")],
        data=Data(family="onebug"),
        trainer=Trainer(launcher="ray", cluster=Cluster(ray="auto", jobs=jobs)),
    )
    run_id = secrets.token_hex(4)
    file = RunFile(run_id=run_id, server_url=server.url, event_token="events", runner_token="t", runtimes=root, spec=spec)
    write_atomic(run.run_file, file.model_dump_json())
    return run


def start(run: RunDir, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer.launch", "--run-dir", str(run.root), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def jobs_of(address: str, run: RunDir) -> dict[str, str]:
    mine = ray_job.name(run.load().run_id, 0).removesuffix("0")
    known = ((job["submission_id"] or "", job["status"]) for job in listed(address))
    return {name.removeprefix(mine): status for name, status in known if name.startswith(mine)}


def listed(address: str) -> list[dict[str, str]]:
    """Over HTTP: Ray's client reads its token once per process, and this one may have had another."""
    answer = httpx.get(
        f"{address}/api/jobs/", headers={"authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}, trust_env=False, timeout=60
    )
    jobs: list[dict[str, str]] = answer.raise_for_status().json()
    return jobs


def test_the_jobs_words_and_its_exit_code_come_back(tmp_path: Path, cluster: str, server: FakeServer) -> None:
    run = prepare(tmp_path / "run", server, cluster, tmp_path / "nowhere")
    done = start(run)
    output, errors = done.communicate(timeout=120)
    assert done.returncode == FINAL, errors
    assert f"failed: model.path '{tmp_path / 'nowhere'}' is no checkpoint directory" in output
    assert jobs_of(cluster, run) == {"1": "FAILED"}
    (state,) = server.bodies()
    assert state.type == "run_state", "the run's end is reported from the job"


def waiting(tmp_path: Path, server: FakeServer, cluster: str) -> RunDir:
    """A trainer that waits for a runner which never comes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return prepare(tmp_path / "run", server, cluster, model)


def running(cluster: str, run: RunDir, attempt: str) -> None:
    while jobs_of(cluster, run).get(attempt) != "RUNNING":
        time.sleep(0.2)


def test_to_end_the_process_is_to_stop_the_job(tmp_path: Path, cluster: str, server: FakeServer) -> None:
    run = waiting(tmp_path, server, cluster)
    launched = start(run)
    running(cluster, run, "1")
    launched.terminate()
    launched.communicate(timeout=90)
    assert launched.returncode == TERMINATED
    assert jobs_of(cluster, run) == {"1": "STOPPED"}


def test_a_job_that_an_earlier_start_left_is_stopped_first(tmp_path: Path, cluster: str, server: FakeServer) -> None:
    run = waiting(tmp_path, server, cluster)
    first = start(run)
    running(cluster, run, "1")
    first.kill()
    first.communicate()
    assert jobs_of(cluster, run) == {"1": "RUNNING"}, "a killed process takes no job with it"
    again = start(run, "--attempt", "2")
    running(cluster, run, "2")
    assert jobs_of(cluster, run) == {"1": "STOPPED", "2": "RUNNING"}
    again.terminate()
    again.communicate(timeout=90)
    assert again.returncode == TERMINATED


def test_a_cluster_that_is_not_there_is_said(tmp_path: Path, server: FakeServer) -> None:
    run = prepare(tmp_path / "run", server, "http://127.0.0.1:9", tmp_path)
    done = start(run)
    output, _ = done.communicate(timeout=120)
    assert done.returncode == FINAL
    assert output.startswith("failed: trainer.cluster.jobs: no Ray Jobs API answers at http://127.0.0.1:9")
