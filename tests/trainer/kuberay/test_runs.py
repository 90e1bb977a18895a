"""Whole runs through a real server: its supervisor, the stand-in, the fake cluster's pods, and events back into the record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.launchers.identity import kill_marked
from server.schemas.checks import CheckReport, Level
from server.schemas.states import RunState
from tests.server.launchers.conftest import Server
from tests.server.waiting import until
from tests.trainer.kuberay.fake_kuberay import FakeKubeRay
from tests.trainer.kuberay.specs import in_cluster

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("serve.py")


class ClusterServer(Server):
    def up(self, port: int = 0) -> None:
        self.process = subprocess.Popen([sys.executable, "-P", str(SCRIPT), str(self.data.root), str(port)])
        until(lambda: self.data.server_file.exists() and self._file().pid == self.process.pid)
        token = self.data.token.read_text().strip()
        self.http = httpx.Client(base_url=self._file().url, headers={"authorization": f"Bearer {token}"}, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeKubeRay]:
    cluster = FakeKubeRay(tmp_path_factory.mktemp("cluster") / "c")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServer]:
    server = ClusterServer(tmp_path_factory.mktemp("data"))
    server.up()
    yield server
    server.kill()
    server.clean_up()


def start(server: ClusterServer, cluster: FakeKubeRay, name: str, **overrides: object) -> str:
    return server.start_run(name, **in_cluster(cluster.kubeconfig), **overrides)


def running(server: ClusterServer, run_id: str) -> None:
    until(lambda: server.status(run_id).state is RunState.RUNNING)


def gone(cluster: FakeKubeRay) -> bool:
    return not cluster.names("rayjobs") and not cluster.names("secrets")


def test_a_run_trains_in_the_cluster_and_is_recorded_here(server: ClusterServer, cluster: FakeKubeRay) -> None:
    run_id = start(server, cluster, "free")
    status = server.end_of(run_id)
    assert (status.state, status.problem, status.steps_done) == (RunState.SUCCEEDED, "", 3)
    assert [(point.step, point.value) for point in status.held_out] == [(0, 0.25), (3, 0.75)]
    lines = server.http.get(f"/api/runs/{run_id}/logs/trainer").json()["lines"]
    assert lines[0].startswith(f"asked {cluster.url} for RayJob lego-rl-{run_id}-1")
    assert gone(cluster) and not server.dir(run_id).runner_file.exists(), "the runner was in the cluster"
    assert server.processes(run_id) == []


def test_a_failed_driver_fails_the_run_with_its_first_error(server: ClusterServer, cluster: FakeKubeRay) -> None:
    overrides = {"trainer.checkpoint.restarts": 0}
    status = server.end_of(start(server, cluster, "free-raises", **overrides))
    assert status.state is RunState.FAILED
    assert status.problem == "the trainer ended with exit code 3: ValueError: the loss is NaN (trainer.log)"


def test_a_driver_that_died_goes_on_from_its_checkpoint_in_a_new_job(server: ClusterServer, cluster: FakeKubeRay) -> None:
    run_id = start(server, cluster, "free-dies")
    status = server.end_of(run_id)
    assert (status.state, status.steps_done) == (RunState.SUCCEEDED, 3)
    lines = server.http.get(f"/api/runs/{run_id}/logs/trainer").json()["lines"]
    asked = [line.split()[4] for line in lines if line.startswith("asked ")]
    assert asked == [f"lego-rl-{run_id}-1", f"lego-rl-{run_id}-2"] and gone(cluster)


def test_stopping_a_run_deletes_its_job(server: ClusterServer, cluster: FakeKubeRay) -> None:
    run_id = start(server, cluster, "held")
    running(server, run_id)
    server.http.post(f"/api/runs/{run_id}/stop")
    status = server.end_of(run_id)
    assert (status.state, status.reason) == (RunState.STOPPED, "stopped by request") and gone(cluster)


def test_what_a_run_waits_for_is_in_its_status(server: ClusterServer, cluster: FakeKubeRay) -> None:
    cluster.faults.pods = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    run_id = start(server, cluster, "free")
    summary = until(lambda: "Insufficient" in (status := server.status(run_id)).summary and status.summary)
    assert summary.startswith("starting, 0 of 3 steps; 0 of 1 pods are ready; pod ") and summary.endswith("3 Insufficient nvidia.com/gpu.")
    cluster.faults.pods = ""
    status = server.end_of(run_id)
    assert (status.state, status.reason) == (RunState.SUCCEEDED, "")


def test_a_run_outlives_its_server_and_a_machine_that_lost_everything(server: ClusterServer, cluster: FakeKubeRay) -> None:
    """First the server alone is killed; then supervisor and stand-in with it, as when the server's pod is replaced. Trainer and runner know
    nothing of either."""
    created = cluster.counts["create rayjobs"]
    run_id = start(server, cluster, "held")
    running(server, run_id)
    uid, port = cluster.job()["metadata"]["uid"], int(str(server.http.base_url).rstrip("/").rpartition(":")[2])
    before = {process.pid for process in server.processes(run_id)}
    server.kill()
    server.up(port)
    assert {process.pid for process in server.processes(run_id)} == before
    lost = server.processes(run_id)
    assert {process.role for process in lost} == {"supervisor", "trainer"}
    server.kill()
    for process in lost:
        os.kill(process.pid, signal.SIGKILL)
    kill_marked(run_id)
    server.up(port)
    assert server.status(run_id).state is RunState.RUNNING
    until(lambda: {process.role for process in server.processes(run_id)} == {"supervisor", "trainer"})
    assert cluster.job()["metadata"]["uid"] == uid
    (cluster.volume / run_id / "go").touch()
    status = server.end_of(run_id)
    assert (status.state, status.steps_done) == (RunState.SUCCEEDED, 3)
    assert cluster.counts["create rayjobs"] == created + 1 and gone(cluster)


def test_a_job_that_somebody_deletes_is_not_begun_again(server: ClusterServer, cluster: FakeKubeRay) -> None:
    created = cluster.counts["create rayjobs"]
    run_id = start(server, cluster, "held")
    running(server, run_id)
    cluster.remove(f"lego-rl-{run_id}-1")
    status = server.end_of(run_id)
    assert status.state is RunState.FAILED
    lines = server.http.get(f"/api/runs/{run_id}/logs/trainer").json()["lines"]
    assert lines[-1] == f"failed: RayJob lego-rl-{run_id}-1 was deleted from the cluster, and not by this server"
    assert cluster.counts["create rayjobs"] == created + 1


def test_the_check_asks_the_cluster_and_refuses_a_server_that_pods_cannot_reach(server: ClusterServer, cluster: FakeKubeRay) -> None:
    request = {"document": {"extends": "local"}, "overrides": in_cluster(cluster.kubeconfig), "skip_slow": True}
    check_id = server.http.post("/api/checks", json=request).json()["check_id"]
    answer = until(lambda: server.http.get(f"/api/checks/{check_id}", params={"wait": 5}).json().get("report"))
    report = CheckReport.model_validate(answer)
    found = {check.code: check for check in report.checks}
    assert (found["cluster"].level, found["cluster"].message) == (
        Level.OK,
        "Kubernetes v1.33.0-fake would take the job: rights, RayJob and claims are there",
    )
    assert found["reachable"].level is Level.ERROR and "which in a pod is the pod itself" in found["reachable"].message
    assert "--host 0.0.0.0 --public" in found["reachable"].fix and "trainer.cluster.kubernetes.server" in found["reachable"].fix
    assert not report.ok and found["unseen"].level is Level.SKIPPED
