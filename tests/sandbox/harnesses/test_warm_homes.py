"""Homes of warm parents whose runner was killed while they started."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from sandbox.harnesses.warm import _sweep_homes


def test_only_homes_of_runners_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"lego-warm-{ended.pid}-abc"
    (left / "sub").mkdir(parents=True)
    mine, odd = tmp_path / f"lego-warm-{os.getpid()}-abc", tmp_path / "lego-warm-x-y"
    for path in (mine, odd):
        path.mkdir()
    (tmp_path / f"lego-warm-{ended.pid}-link").symlink_to(mine)
    _sweep_homes()
    assert not left.exists() and mine.is_dir() and odd.is_dir()
