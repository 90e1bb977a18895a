from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from server.schemas.runspec import History
from trainer.replay.play import Played, player

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """174 recordings of six harnesses, 35 more of what those do not show, 23 of Terminus 2, and 20 of the pinned Claude Code
    as its adapter sets it; they compress to a hundredth."""
    folder = tmp_path_factory.mktemp("recordings")
    for name in ("recordings", "more", "terminus", "pinned"):
        with tarfile.open(HERE / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def play() -> Iterator[Callable[[Path], Played]]:
    with player(History.KEEP) as play:
        yield cache(play)
