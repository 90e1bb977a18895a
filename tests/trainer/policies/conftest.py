from pathlib import Path

import pytest

from sandbox.tasks.export import rows
from trainer.policies.demonstrations import Task


@pytest.fixture(scope="session")
def tasks() -> list[Task]:
    return [Task(**row) for row in rows(seed=11, n=60, held_out=False)]


@pytest.fixture(scope="session")
def recorded() -> Path:
    return Path(__file__).parent / "recorded"
