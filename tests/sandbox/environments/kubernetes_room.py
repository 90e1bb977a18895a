"""The Kubernetes backend in tests: with the fake API server, or with the real one of `make test-cluster`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.environments.kubernetes.backend import Kubernetes
from sandbox.environments.namespace.host import Host
from server.schemas.runspec import Sandbox as Settings
from tests.cluster.config import IMAGE as CLUSTER_IMAGE
from tests.cluster.node import MARK

from .fake_kubernetes import NAMESPACE, FakeCluster, Image

IMAGE = "lego-test:1"


@dataclass
class KubernetesRoom:
    """A backend and the loop that it lives in. `fake` is None where the cluster is real."""

    runner: asyncio.Runner
    host: Kubernetes
    settings: Settings
    fake: FakeCluster | None
    root: Path


def missing(where: str) -> str:
    """Why there is no such cluster here; empty when there is one. The fake one's pods have users of their own, which only root can give."""
    if where == "cluster":
        return "" if MARK in os.environ else "needs a real cluster: `make test-cluster`"
    return "needs root" if os.geteuid() else ""


def settings_for(kubeconfig: Path, image: str, **more: Any) -> Settings:
    kubernetes = {"kubeconfig": str(kubeconfig), "start_s": 30, **more}
    return Settings.model_validate({"environment": "kubernetes", "image": image, "kubernetes": kubernetes})


@contextlib.asynccontextmanager
async def fake_cluster(enforce: bool = True, **images: Image) -> AsyncIterator[tuple[FakeCluster, Path]]:
    with tempfile.TemporaryDirectory(prefix="lego-kube-") as directory:
        root = Path(directory)
        root.chmod(0o755)
        async with Host.open(root / "state", mode="rootful") as host:
            cluster = FakeCluster(host, root, {IMAGE: Image(), **images}, enforce)
            async with cluster.serving():
                yield cluster, root


@contextlib.asynccontextmanager
async def fake_backend(prove: bool = False, **more: Any) -> AsyncIterator[tuple[Kubernetes, FakeCluster, Settings, Path]]:
    async with fake_cluster() as (fake, root):
        settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE, **more)
        async with Kubernetes.open(root / "base", settings, prove=prove) as backend:
            yield backend, fake, settings, root


def real_settings() -> Settings:
    """Scratch lies in memory: a node enforces a limit of disk by eviction, which no command can see coming."""
    more = {"namespace": "default", "memory_volumes": True, "pull_policy": "Never", "start_s": 60}
    return settings_for(Path(os.environ[MARK]), CLUSTER_IMAGE, **more)


@contextlib.asynccontextmanager
async def real_backend() -> AsyncIterator[tuple[Kubernetes, None, Settings, Path]]:
    with tempfile.TemporaryDirectory(prefix="lego-kube-") as directory:
        async with Kubernetes.open(Path(directory), real_settings()) as backend:
            yield backend, None, real_settings(), Path(directory)


@contextlib.contextmanager
def kubernetes_room(where: str) -> Iterator[KubernetesRoom]:
    with asyncio.Runner() as runner:
        opening = real_backend() if where == "cluster" else fake_backend()
        host, fake, settings, root = runner.run(opening.__aenter__())
        try:
            yield KubernetesRoom(runner, host, settings, fake, root)
        finally:
            runner.run(opening.__aexit__(None, None, None))
