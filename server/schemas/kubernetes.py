"""The section `sandbox.kubernetes` of a RunSpec: which cluster, and what a pod of it is like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=63)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PodRuntime(_Section):
    """How the interpreter and the harness runtimes come into a pod. They lie there at the paths that they have on the runner's machine."""

    via: Literal["host_path", "image_volume", "init_container"] = "host_path"
    """`host_path`: the nodes have them too (one node, or a shared file system). `image_volume`: `image` is mounted read-only (Kubernetes
    1.33 or newer with image volumes on). `init_container`: copied from `image` into every pod."""
    image: str | None = None
    """Holds each of these directories at its own path."""
    size_mb: int = Field(default=1024, ge=1)
    """Of the copy that `init_container` makes, on top of the disk limit of a sandbox."""

    @model_validator(mode="after")
    def _has_image(self) -> PodRuntime:
        if (self.via == "host_path") != (self.image is None):
            raise ValueError("runtime.image goes with via image_volume or init_container, and those need it")
        return self


class Kubernetes(_Section):
    kubeconfig: Path | None = None
    """By default the service account of the pod that the runner itself runs in."""
    context: str | None = None
    """Of the kubeconfig; by default its current one."""
    namespace: _Name = "lego-rl"
    runner_address: str | None = None
    """Where pods reach the runner's machine; by default the address by which this machine reaches the API server."""
    runtime: PodRuntime = PodRuntime()
    cpus: float = Field(default=1, gt=0)
    """Limit per pod."""
    cpu_request: float = Field(default=0.1, gt=0)
    memory_request_mb: int | None = Field(default=None, ge=1)
    """By default the limit itself: a node is never overcommitted."""
    runtime_class: _Name | None = None
    """Of all pods, such as one for Nydus, gVisor or Kata; containerd's runtime (the class's `handler`) has the same name."""
    memory_volumes: bool = False
    """Work directory, home and /tmp in memory. Kernels have been seen to leak memory when many such pods come and go."""
    mirrors: dict[str, str] = Field(default_factory=dict)
    """Registry, or registry and first parts of the name → what images of it are pulled from instead. The longest match counts."""
    pull_policy: Literal["IfNotPresent", "Never", "Always"] = "IfNotPresent"
    pull_secrets: list[_Name] = Field(default_factory=list)
    prepull: bool = False
    """Pull every image of the run to every node before the first trial; one that cannot be had fails the trials that need it."""
    pulls: int = Field(default=2, ge=1)
    """Pre-pulls at the same time."""
    pull_pause_s: float = Field(default=0, ge=0)
    """Between the starts of two of them."""
    starts: int = Field(default=8, ge=1)
    """Pods that are being started at the same time."""
    start_s: int = Field(default=120, ge=1)
    """From asking for a pod to its being ready."""
    ttl_s: int = Field(default=7200, ge=60)
    """After this a pod is ended by the cluster, whatever became of the runner."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    priority_class: _Name | None = None
