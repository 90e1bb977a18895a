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
    from tests.trainer.support.main_ppo import opened

    with opened(tmp_path / "run") as world:
        yield world
