"""What `rl check` is told of a cluster, over real HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.schemas.probes import ClusterFacts
from server.schemas.rundir import RunDir
from tests.trainer.kuberay.fake_kuberay import FakeKubeRay
from tests.trainer.kuberay.specs import spec_of
from trainer.launch.kuberay import sources
from trainer.launch.kuberay.layout import lay_out
from trainer.launch.kuberay.preflight import cluster_facts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeKubeRay]:
    cluster = FakeKubeRay(tmp_path_factory.mktemp("c") / "cluster")
    yield cluster
    cluster.stop()


def troubles(cluster: FakeKubeRay, preset: str = "local", **more: object) -> list[tuple[str, str, str]]:
    facts = cluster_facts(spec_of(preset, cluster.kubeconfig, **more))
    assert facts.version == "v1.33.0-fake"
    return [(trouble.where, trouble.message, trouble.fix) for trouble in facts.troubles]


def test_a_cluster_that_would_take_the_job_keeps_nothing(cluster: FakeKubeRay) -> None:
    assert troubles(cluster) == []
    assert cluster.names("rayjobs") == cluster.names("secrets") == []


def test_what_is_missing_is_named_with_what_to_do(cluster: FakeKubeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cluster.faults, "kuberay", False)
        ((where, message, fix),) = troubles(cluster)
        assert where == "KubeRay" and "knows no RayJob" in message and fix.startswith("install KubeRay 1.5.1 or newer (helm install")
    with monkeypatch.context() as patch:
        patch.setattr(cluster.faults, "forbidden", {"create rayjobs", "get pods/log"})
        ((where, message, fix),) = troubles(cluster)
        assert message == "in namespace rl its account may not create rayjobs, get pods/log" and "docs/kubernetes-rbac.yaml" in fix
    with monkeypatch.context() as patch:
        patch.setattr(cluster.faults, "unknown_fields", True)
        ((where, message, fix),) = troubles(cluster)
        assert (where, message) == ("KubeRay", "the cluster's rayjobs.ray.io (v1) does not know spec.rayClusterSpec.authOptions")
    ((where, message, fix),) = troubles(cluster, runs="elsewhere")
    assert (where, message) == ("trainer.cluster.kubernetes.runs", "there is no PersistentVolumeClaim elsewhere in namespace rl")


def test_pods_that_share_a_claim_need_one_that_can_be_shared(cluster: FakeKubeRay) -> None:
    cluster.add("persistentvolumeclaims", {"metadata": {"name": "one-node"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    cluster.add("persistentvolumeclaims", {"metadata": {"name": "models"}, "spec": {"accessModes": ["ReadOnlyMany"]}})
    mounts = [{"claim": "models", "path": "/models"}]
    assert troubles(cluster, runs="one-node", mounts=mounts) == []
    ((_, message, fix),) = troubles(cluster, "paper-qwen3.5-35b", runs="one-node", mounts=mounts)
    assert message == "4 pods share PersistentVolumeClaim one-node, whose access modes are ReadWriteOnce"
    assert fix == "use a claim of mode ReadWriteMany"


def test_a_cluster_that_does_not_answer_and_a_kubeconfig_that_is_none(cluster: FakeKubeRay, tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("nonsense: [")
    (tmp_path / "gone").write_text(cluster.kubeconfig.read_text().replace(cluster.url, "http://127.0.0.1:9"))
    for name, words in (
        ("nowhere", "no way into a cluster"),
        ("broken", "no way into a cluster"),
        ("gone", "no answer from the API server"),
    ):
        facts = cluster_facts(spec_of("local", tmp_path / name))
        (trouble,) = facts.troubles
        assert words in trouble.message and facts.version == ""


def test_the_command_answers_one_document(cluster: FakeKubeRay, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(spec_of("local", cluster.kubeconfig).model_dump_json())
    command = [sys.executable, "-P", "-m", "trainer.cli", "check-cluster", "--spec", str(file)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert ClusterFacts.model_validate_json(done.stdout) == ClusterFacts(version="v1.33.0-fake")


def test_a_later_attempt_finds_a_directory_without_the_runner_before(tmp_path: Path) -> None:
    run, secret = RunDir(tmp_path / "run"), tmp_path / "secret"
    secret.mkdir()
    lay_out(run, secret)
    run.runner_file.write_text("{}")
    (run.root / "checkpoints").mkdir()
    lay_out(run, secret)
    assert not run.runner_file.exists() and (run.root / "checkpoints").is_dir()
    assert run.run_file.readlink() == secret / "run.json"


def test_an_image_of_another_source_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "trainer.launch.kuberay.layout", "--run-dir", str(tmp_path / "run"), "--secret", str(tmp_path)]
    refused = subprocess.run([*command, "--sources", "0" * 16], capture_output=True, text=True)
    assert refused.returncode == 1 and f"of source {sources.digest()}" in refused.stdout and not (tmp_path / "run").exists()
    assert subprocess.run([*command, "--sources", sources.digest()]).returncode == 0
