"""The stand-in against a fake cluster over real HTTP. Its pods' programs are trivial here; whole runs are in `test_runs`."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.schemas.events import WaitingBody
from server.schemas.rundir import RunDir
from tests.server.waiting import until
from tests.trainer.kuberay.fake_kuberay import FakeKubeRay
from tests.trainer.kuberay.specs import lay_out, spec_of
from tests.trainer.support.fake_server import FakeServer
from trainer.launch import FINAL, TERMINATED, FinalError
from trainer.launch.kuberay import job as stand_in
from trainer.launch.kuberay.api import Cluster, ClusterError
from trainer.launch.kuberay.job import JobFile, StandIn
from trainer.launch.kuberay.manifest import settings_of

pytestmark = pytest.mark.slow
PATIENCE_S = 60
HOLDS = "import pathlib, time\nprint('under way', flush=True)\nwhile True: time.sleep(1)"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeKubeRay]:
    cluster = FakeKubeRay(tmp_path / "cluster")
    cluster.programs = {
        "runner": [sys.executable, "-c", "import time\ntime.sleep(1000)"],
        "driver": driver("print('step 1'); print('done')"),
    }
    yield cluster
    cluster.stop()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer("an-event-token")
    yield server
    server.stop()


@pytest.fixture
def handlers() -> Iterator[None]:
    """`submit` is made for a process of its own and takes its signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def driver(program: str) -> list[str]:
    return [sys.executable, "-c", program]


class Started:
    """A stand-in in a thread."""

    def __init__(self, root: Path, cluster: FakeKubeRay, server: FakeServer, attempt: int = 1, **settings: Any) -> None:
        self.run_dir = RunDir(root)
        if not root.exists():
            lay_out(root, spec_of("local", cluster.kubeconfig, **settings), server.url)
        self.told = threading.Event()
        file = self.run_dir.load()
        state = stand_in._state(root / stand_in.FILE, attempt)
        self._one = StandIn(Cluster.connect(settings_of(file.spec)), self.run_dir, file, state, self.told, 0.02)
        self.code: int | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.code = self._one.run()
        except (FinalError, ClusterError) as error:
            self.error = error

    def end(self) -> int | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.code

    def stop(self) -> int | None:
        self.told.set()
        return self.end()

    @property
    def state(self) -> JobFile:
        return JobFile.model_validate_json((self.run_dir.root / stand_in.FILE).read_bytes())


def status(cluster: FakeKubeRay) -> str:
    return str(cluster.job().get("status", {}).get("jobStatus", "")) if cluster.names("rayjobs") else "none"


def running(cluster: FakeKubeRay) -> None:
    until(lambda: status(cluster) == "RUNNING" and any(cluster.logs.values()))


def said(server: FakeServer) -> list[str]:
    return [body.reason for body in server.bodies() if isinstance(body, WaitingBody)]


def test_a_job_runs_and_its_words_and_its_code_come_back(
    tmp_path: Path, cluster: FakeKubeRay, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Started(tmp_path / "r1", cluster, server)
    assert one.end() == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"asked {cluster.url} for RayJob lego-rl-r1-1 in namespace rl"
    assert [line for line in printed if line in ("step 1", "done")] == ["step 1", "done"]
    assert cluster.names("rayjobs") == cluster.names("secrets") == cluster.names("pods") == [], "what is over gives its machines back"
    laid = cluster.volume / "r1"
    assert (laid / "run.json").is_symlink() and (laid / "logs").is_dir() and (laid / "spool").is_dir()
    assert RunDir(laid).load().event_token == "an-event-token"


def test_a_driver_that_failed_is_told_by_its_own_code(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.programs["driver"] = driver("import sys; sys.exit(3)")
    one = Started(tmp_path / "r1", cluster, server)
    assert one.end() == 3 and one.state.code == 3
    # A supervisor that begins anew hears of the same end; the one that goes on asks for the next attempt.
    assert stand_in._state(one.run_dir.root / stand_in.FILE, 1).code == 3
    assert stand_in._state(one.run_dir.root / stand_in.FILE, 2) == JobFile(owner=one.state.owner, attempt=2)


def test_to_end_the_stand_in_is_to_delete_the_job(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.programs["driver"] = driver(HOLDS)
    one = Started(tmp_path / "r1", cluster, server)
    running(cluster)
    assert one.stop() == TERMINATED
    assert cluster.names("rayjobs") == cluster.names("secrets") == []


def test_a_job_that_was_left_behind_is_taken_up_by_its_uid(
    tmp_path: Path, cluster: FakeKubeRay, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    cluster.programs["driver"] = driver(
        f"import pathlib, time\nprint('first', flush=True)\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(.01)\nprint('second')"
    )
    one = Started(tmp_path / "r1", cluster, server)
    running(cluster)
    until(lambda: one.state.log)
    uid = cluster.job()["metadata"]["uid"]
    one._one._delete = lambda _uid: TERMINATED  # type: ignore[method-assign]  # as if killed: it ends, and the job does not
    assert one.stop() == TERMINATED and cluster.job()["metadata"]["uid"] == uid
    capsys.readouterr()
    two = Started(tmp_path / "r1", cluster, server)
    go.touch()
    assert two.end() == 0 and two.state.uid == uid
    assert "second" in (printed := capsys.readouterr().out.splitlines()) and "first" not in printed, "no line is told twice"
    assert cluster.counts["create rayjobs"] == 1


def test_a_creation_whose_answer_was_lost_is_no_second_job(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.faults.drop_creations = 1
    one = Started(tmp_path / "r1", cluster, server)
    assert one.end() == 0
    assert cluster.counts["create rayjobs"] == 1


def test_a_job_of_somebody_else_with_our_name_is_left_alone(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    theirs = cluster.add("rayjobs", {"metadata": {"name": "lego-rl-r1-1", "labels": {"lego-rl/run": "r1", "lego-rl/owner": "another"}}})
    one = Started(tmp_path / "r1", cluster, server)
    assert one.end() is None and "already exists" in str(one.error)
    assert cluster.job() == theirs


def test_a_job_that_was_replaced_is_not_followed_and_not_deleted(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.programs["driver"] = driver(HOLDS)
    one = Started(tmp_path / "r1", cluster, server)
    running(cluster)
    cluster.remove("lego-rl-r1-1")
    theirs = cluster.add("rayjobs", {"metadata": {"name": "lego-rl-r1-1"}})
    assert one.end() is None and "was deleted from the cluster" in str(one.error)
    assert cluster.objects["rayjobs", "lego-rl-r1-1"] == theirs


def test_what_a_job_waits_for_is_said(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.faults.pods = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    one = Started(tmp_path / "r1", cluster, server)
    why = "0 of 1 pods are ready; pod lego-rl-r1-1-head: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    until(lambda: why in said(server))
    cluster.faults.pods = ""
    assert one.end() == 0
    assert said(server).count(why) == 1


def test_a_quota_that_keeps_pods_away_is_said(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.faults.quota = 'pods "head" is forbidden: exceeded quota: team, requested: cpu=8, used: cpu=60, limited: cpu=64'
    one = Started(tmp_path / "r1", cluster, server)
    until(lambda: any("FailedToCreateHeadPod" in reason and "exceeded quota" in reason for reason in said(server)))
    assert one.stop() == TERMINATED


def test_a_cluster_without_an_operator_is_said(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.faults.operator = False
    one = Started(tmp_path / "r1", cluster, server)
    until(lambda: any("does KubeRay run in this cluster" in reason for reason in said(server)))
    assert one.stop() == TERMINATED and cluster.names("rayjobs") == []


def test_a_queue_may_take_its_time(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.faults.operator = False
    one = Started(tmp_path / "r1", cluster, server)
    until(lambda: cluster.names("rayjobs"))
    cluster._status("lego-rl-r1-1", jobDeploymentStatus="Suspended")
    until(lambda: any("suspended" in reason for reason in said(server)))
    assert one.stop() == TERMINATED


def test_an_image_of_another_version_ends_the_run_at_once(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.faults.image = "the image holds lego-rl of source 1, the server is of 2: build the image from the server's checkout"
    one = Started(tmp_path / "r1", cluster, server)
    assert one.end() is None
    assert str(one.error) == f"pod lego-rl-r1-1-head: {cluster.faults.image}"
    assert cluster.names("rayjobs") == []


def test_an_outage_of_the_api_server_ends_nothing(
    tmp_path: Path, cluster: FakeKubeRay, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    cluster.programs["driver"] = driver(
        f"import pathlib, time\nprint('x', flush=True)\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(.01)"
    )
    one = Started(tmp_path / "r1", cluster, server)
    running(cluster)
    cluster.faults.down = True
    seen = cluster.counts.total()
    until(lambda: cluster.counts.total() > seen + 3)
    cluster.faults.down = False
    go.touch()
    assert one.end() == 0
    assert capsys.readouterr().out.count("will ask again: GET rl/rayjobs/lego-rl-r1-1: the API server answers 503") == 1


def test_a_job_that_cannot_be_deleted_is_named(
    tmp_path: Path, cluster: FakeKubeRay, server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "STOP_S", 0.1)
    cluster.programs["driver"] = driver(HOLDS)
    one = Started(tmp_path / "r1", cluster, server)
    running(cluster)
    cluster.faults.forbidden.add("delete rayjobs")
    assert one.stop() == TERMINATED
    assert "`kubectl --namespace rl delete rayjob lego-rl-r1-1`" in capsys.readouterr().out


def test_a_secret_that_is_refused_leaves_no_job(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    cluster.faults.forbidden.add("create secrets")
    one = Started(tmp_path / "r1", cluster, server)
    assert one.end() is None
    assert "answers 403" in str(one.error) and "docs/kubernetes-rbac.yaml" in str(one.error) and "a-token" not in str(one.error)
    assert cluster.names("rayjobs") == []


@pytest.mark.usefixtures("handlers")
def test_a_cluster_without_kuberay_is_final(tmp_path: Path, cluster: FakeKubeRay, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.faults.kuberay = False
    run, file = lay_out(tmp_path / "r1", spec_of("local", cluster.kubeconfig))
    assert stand_in.submit(run, file, 1, poll_s=0.02) == FINAL
    assert "install KubeRay 1.5.1 or newer" in capsys.readouterr().out


@pytest.mark.usefixtures("handlers")
def test_a_broken_note_of_the_job_is_not_taken_for_none(tmp_path: Path, cluster: FakeKubeRay, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = lay_out(tmp_path / "r1", spec_of("local", cluster.kubeconfig))
    (run.root / stand_in.FILE).write_text('{"owner": ')
    assert stand_in.submit(run, file, 1, poll_s=0.02) == FINAL
    assert "so the run's job is not known" in capsys.readouterr().out and cluster.names("rayjobs") == []


def test_no_token_is_written_beside_the_run_file(tmp_path: Path, cluster: FakeKubeRay, server: FakeServer) -> None:
    one = Started(tmp_path / "r1", cluster, server)
    assert one.end() == 0
    tokens = {"an-event-token", "a-token", json.loads(one.run_dir.run_file.read_text())["runner_token"]}
    for file in one.run_dir.root.rglob("*"):
        if file.is_file() and file != one.run_dir.run_file:
            assert not any(token in file.read_text() for token in tokens), file
