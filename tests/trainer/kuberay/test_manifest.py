"""The manifest by value: every row of the RunSpec that a cluster must know, and nothing that it must not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.schemas.rundir import RunFile
from server.spec import SpecError, resolve
from tests.trainer.kuberay.specs import IMAGE, RUNNER, in_cluster, lay_out, spec_of
from trainer.launch.kuberay import sources
from trainer.launch.kuberay.manifest import Job, rayjob, secret
from trainer.launch.plan import trainer_plan

JOB = Job(run_id="261130-1", attempt=2, owner="mine", sources="0123456789abcdef")


def pod(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = template["spec"]
    return found


def test_the_papers_run_row_by_row() -> None:
    spec = spec_of("paper-qwen3.5-35b", runner_image=RUNNER, mounts=[{"claim": "models", "path": "/models"}], tolerated=["nvidia.com/gpu"])
    job = rayjob(spec, JOB)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"] == {
        "name": "lego-rl-261130-1-2",
        "namespace": "rl",
        "labels": {
            "app.kubernetes.io/managed-by": "lego-rl-launcher",
            "lego-rl/run": "261130-1",
            "lego-rl/attempt": "2",
            "lego-rl/owner": "mine",
        },
    }
    cluster = job["spec"].pop("rayClusterSpec")
    submitter = job["spec"].pop("submitterPodTemplate")
    assert job["spec"] == {
        "entrypoint": "python -P -m trainer.launch --run-dir /lego-rl/runs/261130-1 --attempt 2 --in-job",
        "submissionMode": "K8sJobMode",
        "backoffLimit": 0,
        "submitterConfig": {"backoffLimit": 0},
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
    }
    (group,) = cluster.pop("workerGroupSpecs")
    head = cluster.pop("headGroupSpec")
    assert cluster == {"rayVersion": "2.60.0", "authOptions": {"mode": "token"}, "enableInTreeAutoscaling": False}
    # Two nodes that train and one that generates, eight GPUs each (Table 10); the head has none.
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"], group["numOfHosts"]) == (3, 3, 3, 1)
    (worker,) = pod(group["template"])["containers"]
    assert worker["resources"]["limits"] == worker["resources"]["requests"] == {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert group["rayStartParams"] == {"num-gpus": "8"} and worker["image"] == IMAGE
    assert pod(group["template"])["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert (head["serviceType"], head["enableIngress"]) == ("ClusterIP", False)
    assert head["rayStartParams"] == {"num-cpus": "8", "num-gpus": "0"}
    ray, runner = pod(head["template"])["containers"]
    assert (ray["name"], ray["image"], runner["image"]) == ("ray-head", IMAGE, RUNNER)
    assert runner["command"] == ["python", "-P", "-m", "sandbox.runner", "--run-dir", "/lego-rl/runs/261130-1"]
    (layout,) = pod(head["template"])["initContainers"]
    assert layout["command"][-2:] == ["--sources", "0123456789abcdef"] and layout["image"] == IMAGE
    assert pod(submitter)["restartPolicy"] == "Never" and "volumes" not in pod(submitter)
    # Only the head, whose runner makes sandboxes, may talk to the API server.
    assert [pod(t)["automountServiceAccountToken"] for t in (head["template"], group["template"], submitter)] == [True, False, False]
    assert pod(head["template"])["serviceAccountName"] == "runner"
    for template in (head["template"], group["template"]):
        volumes = {volume["name"]: volume for volume in pod(template)["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert volumes["claim-models"]["persistentVolumeClaim"] == {"claimName": "models"}
        assert volumes["secret"]["secret"]["secretName"] == "lego-rl-261130-1-2"
        mounts = {mount["name"]: mount for mount in pod(template)["containers"][0]["volumeMounts"]}
        assert mounts["claim-models"] == {"name": "claim-models", "mountPath": "/models", "readOnly": True}
        assert mounts["shm"]["mountPath"] == "/dev/shm"  # noqa: S108 -- in the pod
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "128Gi"}


def test_a_run_on_cpus_is_one_pod_that_counts_as_ray_does() -> None:
    cluster = rayjob(spec_of("local"), JOB)["spec"]["rayClusterSpec"]
    assert cluster["workerGroupSpecs"] == []
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "16", "num-gpus": "2"}


def test_no_token_is_in_the_manifest_and_the_secret_goes_with_its_job(tmp_path: Path) -> None:
    _, file = lay_out(tmp_path / "261130-1", spec_of("local", server="https://control.example:8420"))
    manifest = json.dumps(rayjob(file.spec, JOB))
    assert file.event_token not in manifest and file.runner_token not in manifest and '"env"' not in manifest
    made = secret(file, JOB, "the-uid")
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": JOB.name, "uid": "the-uid", "controller": False}
    ]
    inside = RunFile.model_validate_json(made["stringData"]["run.json"])
    assert (inside.server_url, str(inside.runtimes)) == ("https://control.example:8420", "/opt/lego-rl/runtimes")
    assert (inside.event_token, inside.runner_token, inside.spec) == (file.event_token, file.runner_token, file.spec)


def test_a_user_and_labels_of_a_queue() -> None:
    job = rayjob(spec_of("local", user=1000, labels={"kueue.x-k8s.io/queue-name": "gpus", "lego-rl/run": "forged"}), JOB)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus" and job["metadata"]["labels"]["lego-rl/run"] == JOB.run_id
    head = pod(job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"])
    assert head["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("trainer.cluster.kubernetes", None, "set trainer.cluster.kubernetes"),
        ("trainer.start", "warm_fork", "start: plain"),
        ("sandbox.environment", "namespace", "set sandbox.environment: kubernetes"),
        ("trainer.cluster.kubernetes", {"image": "lego-rl:latest", "runs": "runs"}, "sha256"),
        ("trainer.cluster.kubernetes", {"image": IMAGE, "runs": "runs", "head": {"memory_gb": 4}}, "counts towards memory_gb"),
        ("trainer.cluster.kubernetes", {"image": IMAGE, "runs": "runs", "server": "ftp://x"}, "https?"),
    ],
)
def test_what_cannot_go_to_a_cluster_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("?", r"\?")):
        resolve({"extends": "local"}, in_cluster() | {field: value})


def test_the_plan_is_the_manifest_and_says_what_its_entrypoint_composes() -> None:
    plan = trainer_plan(spec_of("paper-qwen3.5-35b"))
    lines = list(plan.lines())
    manifest = yaml.safe_load("\n".join(lines))
    assert manifest == plan.manifest == plan.as_json()["manifest"]
    assert shlex.split(manifest["spec"]["entrypoint"])[-1] == "--in-job"
    comments = [line for line in lines if line.startswith("#")]
    assert any("trainer.nnodes=2" in line for line in comments) and any("+lego.run_dir=/lego-rl/runs/run" in line for line in comments)
    head = pod(manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"])
    assert head["initContainers"][0]["command"][-1] == sources.digest()


def test_the_plan_of_a_run_on_this_machine_has_no_manifest() -> None:
    assert "manifest" not in trainer_plan(resolve({"extends": "single-node"}).spec).as_json()
