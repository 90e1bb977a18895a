from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin.client import Client
from plugin.local import ensure_server, stop_server
from server.schemas.datadir import DataDir


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDir:
    return DataDir(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def client(data: DataDir) -> Iterator[Client]:
    """A client of a control plane that runs in a process of its own."""
    up = ensure_server(data, port=0)
    yield up.client
    up.client.close()
    stop_server(data)


@pytest.fixture
def empty(tmp_path: Path) -> DataDir:
    """A data directory that no server has seen."""
    return DataDir(tmp_path / "empty")
