"""What is asked of the cluster: one RayJob per attempt, and one Secret that belongs to it. Pure.

The head trains nothing when there are GPUs: it runs the driver, the rollouts' proxy and, in a container beside them, the runner. They
share the pod's loopback address, so nothing of a run listens on the network but Ray, behind its token and a ClusterIP. The workers have the
GPUs: one pod for each of the RunSpec's nodes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from kubernetes import client
from kubernetes.client import ApiClient, V1Container, V1PodSpec, V1PodTemplateSpec, V1Volume, V1VolumeMount

from server.schemas.kuberay import KubeRay, Size
from server.schemas.rundir import RunFile
from server.schemas.runspec import RunSpec

from . import RUNS, SECRET

Object = dict[str, Any]
GROUP, VERSION, PLURAL = "ray.io", "v1", "rayjobs"
MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "lego-rl-launcher"
"""Another one than that of sandboxes: a runner removes what it takes for pods that were left behind."""
RUN, ATTEMPT, OWNER, ROLE = "lego-rl/run", "lego-rl/attempt", "lego-rl/owner", "lego-rl/role"
HEAD, WORKER, SUBMITTER, LAYOUT, RUNNER = "head", "worker", "submitter", "layout", "runner"
CPUS_AND_GPUS = {"num-cpus": "16", "num-gpus": "2"}
"""Logical, as in a cluster of the run's own on a CPU: verl's actors reserve one each, and it counts workers in GPUs."""


@dataclass(frozen=True, slots=True)
class Job:
    """Which RayJob. `owner` was drawn for the run by its stand-in: it tells our job from one of another server with the same run's name."""

    run_id: str
    attempt: int
    owner: str
    sources: str
    """Digest of this program's source (`sources.digest`), which the image must have too."""

    @property
    def name(self) -> str:
        return f"lego-rl-{self.run_id}-{self.attempt}"

    @property
    def run_dir(self) -> str:
        return f"{RUNS}/{self.run_id}"

    @property
    def labels(self) -> dict[str, str]:
        return {MANAGED_BY: MANAGER, RUN: self.run_id, ATTEMPT: str(self.attempt), OWNER: self.owner}

    @property
    def selector(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.labels.items())


def settings_of(spec: RunSpec) -> KubeRay:
    settings = spec.trainer.cluster.kubernetes
    assert settings is not None  # noqa: S101 -- validated with launcher: kubernetes
    return settings


def rayjob(spec: RunSpec, job: Job) -> Object:
    """The whole manifest, as JSON."""
    settings, cluster = settings_of(spec), spec.trainer.cluster
    workers = (
        [] if spec.trainer.device == "cpu" else [_workers(settings, job, cluster.nodes + cluster.rollout_nodes, cluster.gpus_per_node)]
    )
    head: Object = {
        "serviceType": "ClusterIP",
        "enableIngress": False,
        "rayStartParams": {"num-cpus": str(settings.head.cpus), "num-gpus": "0"} if workers else CPUS_AND_GPUS,
        "template": _head(settings, job, apart=bool(workers)),
    }
    manifest: Object = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "RayJob",
        "metadata": {"name": job.name, "namespace": settings.namespace, "labels": dict(settings.labels) | job.labels},
        "spec": {
            "entrypoint": entrypoint(settings, job),
            "submissionMode": "K8sJobMode",
            "backoffLimit": 0,  # a trainer that died is started again by its supervisor, from a checkpoint
            "submitterConfig": {"backoffLimit": 0},
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": settings.ttl_s,
            "submitterPodTemplate": _submitter(settings, job),
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},  # whoever reaches the dashboard could otherwise run programs
                "enableInTreeAutoscaling": False,
                "headGroupSpec": head,
                "workerGroupSpecs": workers,
            },
        },
    }
    plain: Object = ApiClient().sanitize_for_serialization(manifest)
    return plain


def entrypoint(settings: KubeRay, job: Job) -> str:
    """Runs on the head; it composes the overrides that `rl plan` shows, in its own process."""
    command = [settings.python, "-P", "-m", "trainer.launch", "--run-dir", job.run_dir, "--attempt", str(job.attempt), "--in-job"]
    return shlex.join(command)


def secret(file: RunFile, job: Job, uid: str) -> Object:
    """run.json, as the pods are to read it. It goes with the job: the cluster removes what belongs to an object that is gone."""
    settings = settings_of(file.spec)
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RayJob", "name": job.name, "uid": uid, "controller": False}
    inside = file.model_copy(update={"server_url": settings.server or file.server_url, "runtimes": settings.runtimes})
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": job.name, "namespace": settings.namespace, "labels": job.labels, "ownerReferences": [owner]},
        "type": "Opaque",
        "immutable": True,
        "stringData": {"run.json": inside.model_dump_json()},
    }


def _head(settings: KubeRay, job: Job, *, apart: bool) -> V1PodTemplateSpec:
    """`apart`: other pods have the GPUs, and the node selector is theirs."""
    layout = [settings.python, "-P", "-m", "trainer.launch.kuberay.layout", "--run-dir", job.run_dir, "--sources", job.sources]
    runner = [settings.runner_python, "-P", "-m", "sandbox.runner", "--run-dir", job.run_dir]
    mounts = _mounts(settings)
    return _template(
        settings,
        job,
        HEAD,
        [
            V1Container(name="ray-head", image=settings.image, resources=_resources(settings.head), volume_mounts=[*mounts, _SHM]),
            V1Container(
                name=RUNNER,
                image=settings.runner_image or settings.image,
                command=runner,
                resources=_resources(settings.runner),
                volume_mounts=mounts,
            ),
        ],
        volumes=_volumes(settings, job, settings.head.shm_gb),
        init_containers=[
            V1Container(
                name=LAYOUT,
                image=settings.image,
                command=layout,
                resources=_small(),
                volume_mounts=mounts,
                termination_message_policy="FallbackToLogsOnError",  # its words are the reason that people see
            )
        ],
        service_account_name=settings.service_account,
        automount_service_account_token=True,
        node_selector=None if apart else settings.node_selector,
    )


def _workers(settings: KubeRay, job: Job, pods: int, gpus: int) -> Object:
    """verl asks Ray for nodes of `gpus` GPUs and does not care which of them trains and which generates."""
    container = V1Container(
        name="ray-worker",
        image=settings.image,
        resources=_resources(settings.worker, {settings.gpu: str(gpus)}),
        volume_mounts=[*_mounts(settings), _SHM],
    )
    template = _template(
        settings,
        job,
        WORKER,
        [container],
        volumes=_volumes(settings, job, settings.worker.shm_gb),
        node_selector=settings.node_selector,
        tolerations=[client.V1Toleration(key=key, operator="Exists") for key in settings.tolerated],
    )
    count = {"replicas": pods, "minReplicas": pods, "maxReplicas": pods, "numOfHosts": 1}
    return {"groupName": "gpus", **count, "rayStartParams": {"num-gpus": str(gpus)}, "template": template}


def _submitter(settings: KubeRay, job: Job) -> V1PodTemplateSpec:
    """Hands the entrypoint to the head and prints its log, which is how the log comes out of the cluster."""
    container = V1Container(name="ray-job-submitter", image=settings.image, resources=_small())
    return _template(settings, job, SUBMITTER, [container], restart_policy="Never")


def _template(settings: KubeRay, job: Job, role: str, containers: Sequence[V1Container], **more: Any) -> V1PodTemplateSpec:
    pod: dict[str, Any] = {
        "automount_service_account_token": False,
        "enable_service_links": False,
        "priority_class_name": settings.priority_class,
    } | more
    user = settings.user
    if user is not None:
        pod["security_context"] = client.V1PodSecurityContext(run_as_user=user, run_as_group=user, fs_group=user)
    secrets = [client.V1LocalObjectReference(name=name) for name in settings.pull_secrets]
    return V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels=job.labels | {ROLE: role}),
        spec=V1PodSpec(containers=list(containers), image_pull_secrets=secrets or None, **pod),
    )


_SHM = V1VolumeMount(name="shm", mount_path="/dev/shm")  # noqa: S108 -- in the pod


def _mounts(settings: KubeRay) -> list[V1VolumeMount]:
    ours = [
        V1VolumeMount(name="runs", mount_path=RUNS),
        V1VolumeMount(name="secret", mount_path=SECRET, read_only=True),
    ]
    theirs = (
        V1VolumeMount(name=_volume(mount.claim), mount_path=mount.path, sub_path=mount.sub_path or None, read_only=mount.read_only)
        for mount in settings.mounts
    )
    return [*ours, *theirs]


def _volumes(settings: KubeRay, job: Job, shm_gb: int) -> list[V1Volume]:
    def claim(name: str, of: str) -> V1Volume:
        return V1Volume(name=name, persistent_volume_claim=client.V1PersistentVolumeClaimVolumeSource(claim_name=of))

    return [
        claim("runs", settings.runs),
        *(claim(_volume(name), name) for name in sorted({mount.claim for mount in settings.mounts})),
        V1Volume(name="secret", secret=client.V1SecretVolumeSource(secret_name=job.name, default_mode=0o440)),
        V1Volume(name="shm", empty_dir=client.V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{shm_gb}Gi")),
    ]


def _volume(claim: str) -> str:
    """A volume's name has no dots."""
    return f"claim-{claim.replace('.', '-')}"[:63].rstrip("-")


def _resources(size: Size, more: Mapping[str, str] | None = None) -> client.V1ResourceRequirements:
    amount = {"cpu": str(size.cpus), "memory": f"{size.memory_gb}Gi", **(more or {})}
    return client.V1ResourceRequirements(limits=amount, requests=amount)


def _small() -> client.V1ResourceRequirements:
    return client.V1ResourceRequirements(limits={"cpu": "1", "memory": "1Gi"}, requests={"cpu": "100m", "memory": "256Mi"})
