from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.models import make_model


@pytest.mark.slow
def test_updates_follow_the_objective_over_branches(tmp_path: Path) -> None:
    """Three optimizer steps on rollouts with several branches, in several micro-batches, equal plain autograd on the formula."""
    make_model(moe=True, tied=False).save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.trainer.verl_plugin.update_probe", str(tmp_path), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])

    assert answer["losses"] == pytest.approx(answer["by_hand"], abs=1e-6)
    assert answer["rollouts"] == pytest.approx([3, 3, 3])
    assert answer["clipped"][0] == 0 and max(answer["clipped"]) > 0  # the clip was reached, or the test shows less than it should
    assert answer["moved"] > 1e-3 and answer["parameter_gap"] < 2e-5
