"""The remake command refuses before it spends minutes."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_an_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.policies.remake", "--harness", "mini-swe-agent", "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "name a directory that does not" in done.stderr
