"""The section `trainer.cluster.kubernetes` of a RunSpec: the cluster that a run goes to as a KubeRay RayJob, and what its pods are like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=63)]
Image = Annotated[str, Field(pattern=r"^[\w.:/-]+@sha256:[0-9a-f]{64}$")]
"""Pinned by digest: a tag may name something else by the time that a second pod pulls it."""
_InPod = Annotated[str, Field(pattern=r"^/[\w./-]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Size(_Section):
    """Requests and limits of a container alike: what is under way must not be the first to go when a node runs short."""

    cpus: int = Field(default=8, ge=1)
    memory_gb: int = Field(default=32, ge=1)
    shm_gb: int = Field(default=8, ge=1)
    """Of the memory, for /dev/shm: Ray's objects and NCCL's buffers."""

    @model_validator(mode="after")
    def _shared_memory_is_memory(self) -> Self:
        if self.shm_gb >= self.memory_gb:
            raise ValueError(f"shm_gb: /dev/shm counts towards memory_gb ({self.memory_gb}); make it smaller")
        return self


class Mount(_Section):
    """A PersistentVolumeClaim in every pod of the run, such as one with models and tasks."""

    claim: _Name
    path: _InPod
    sub_path: Annotated[str, Field(pattern=r"^([\w-][\w./-]*)?$")] = ""
    read_only: bool = True


class KubeRay(_Section):
    image: Image
    """Of head and workers: this version of lego-rl with its trainer, and Ray."""
    server: Annotated[str, Field(pattern=r"^(https?://([\w.-]+|\[[0-9a-fA-F:]+\])(:\d+)?)?$")] = ""
    """Where pods reach the control plane. By default where it listens, when that is no loopback address."""
    runs: _Name
    """Claim that keeps runs' directories, checkpoints among them; with more than one pod it must be ReadWriteMany."""
    mounts: list[Mount] = Field(default_factory=list)
    kubeconfig: Path | None = None
    """By default the service account of the pod that the server itself runs in."""
    context: str | None = None
    """Of the kubeconfig; by default its current one."""
    namespace: _Name = "lego-rl"
    service_account: _Name = "runner"
    """Of the head, whose runner makes sandboxes (docs/kubernetes-rbac.yaml). Workers get no token."""
    python: Annotated[str, Field(pattern=r"^[\w./-]+$")] = "python"
    """In `image`."""
    runner_image: Image | None = None
    """By default `image`: vLLM and Harbor need different releases of FastAPI, so an image for GPUs has no runner."""
    runner_python: Annotated[str, Field(pattern=r"^[\w./-]+$")] = "python"
    """In the runner's image."""
    runtimes: _InPod = "/opt/lego-rl/runtimes"
    """The store of harness runtimes, in the runner's image or on a mount."""
    user: int | None = Field(default=None, ge=1)
    """And group, and group of the volumes; by default the image's own. It must be able to write `runs`."""
    head: Size = Size()
    worker: Size = Size(cpus=64, memory_gb=512, shm_gb=128)
    runner: Size = Size(cpus=4, memory_gb=16, shm_gb=1)
    gpu: Annotated[str, Field(pattern=r"^[\w./-]+$")] = "nvidia.com/gpu"
    """The resource by which nodes offer GPUs."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Of workers; of the head when there are none."""
    tolerated: list[str] = Field(default_factory=list)
    """Keys of taints that workers tolerate, whatever their value."""
    priority_class: _Name | None = None
    pull_secrets: list[_Name] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    """More labels of the job, such as the name of a queue."""
    start_s: int = Field(default=1800, ge=10)
    """From asking for the job to its running, not counting time in a queue; then the run fails with what its pods wait for."""
    ttl_s: int = Field(default=600, ge=0)
    """After its end a job that nobody follows gives its machines back."""
