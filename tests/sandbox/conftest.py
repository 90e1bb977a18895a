"""What tests of sandboxes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox.environments import docker_engine as docker


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[docker.TestEngine]:
    """A real engine with an image; skips the test where none can be started."""
    if reason := docker.missing():
        pytest.skip(reason)
    with docker.engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def docker_room(docker_engine: docker.TestEngine) -> Iterator[docker.DockerRoom]:
    with docker.docker_room(docker_engine) as room:
        yield room
