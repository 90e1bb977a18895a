"""What tests of sandboxes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox.environments import docker_engine as docker
from tests.sandbox.environments import kubernetes_room as kubernetes


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[docker.TestEngine]:
    """A real engine with an image; skips the test where none can be started."""
    if reason := docker.missing():
        pytest.skip(reason)
    with docker.engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def docker_room(docker_engine: docker.TestEngine) -> Iterator[docker.DockerRoom]:
    with docker.docker_room(docker_engine) as room:
        yield room


@pytest.fixture(scope="module")
def kubernetes_room() -> Iterator[kubernetes.KubernetesRoom]:
    if reason := kubernetes.missing("kubernetes"):
        pytest.skip(reason)
    with kubernetes.kubernetes_room("kubernetes") as room:
        yield room


@pytest.fixture(scope="module")
def cluster_room() -> Iterator[kubernetes.KubernetesRoom]:
    if reason := kubernetes.missing("cluster"):
        pytest.skip(reason)
    with kubernetes.kubernetes_room("cluster") as room:
        yield room
