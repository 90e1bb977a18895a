from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.trainer.support.main_ppo import World


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-MoE checkpoint."""
    from tests.trainer.support.tiny_policy import save_policy

    path = tmp_path_factory.mktemp("policy")
    save_policy(path)
    return path


@pytest.fixture
def bare_world(tmp_path: Path) -> Iterator[World]:
    """A run's directory, a server for its events, and a runner whose `play` the test sets."""
    from server.schemas.rundir import RunDir
    from tests.trainer.support.fake_runner import FakeRunner, scored
    from tests.trainer.support.fake_server import FakeServer
    from tests.trainer.support.main_ppo import World

    async def nothing(*_: object) -> object:
        return scored(0)

    server, run = FakeServer("events"), RunDir(tmp_path / "run")
    run.root.mkdir()
    runner = FakeRunner(run.runner_file, "trials", nothing)  # type: ignore[arg-type]
    runner.start()
    yield World(run, server, runner)
    runner.stop()
    server.stop()
