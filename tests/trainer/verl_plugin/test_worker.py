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
def test_updates_follow_every_objective_over_branches_with_failures_present(tmp_path: Path) -> None:
    """Fourteen optimizer steps on rollouts with several branches, in several micro-batches, equal plain autograd on the formulas."""
    make_model(moe=True, tied=False).save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.trainer.verl_plugin.update_probe", str(tmp_path), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])

    cases = answer["cases"]
    recomputed = cases.pop("gspo_recomputed")
    for name, case in cases.items():
        assert case["loss"] == pytest.approx(case["by_hand"], abs=1e-6), name
        assert case["rollouts"] == pytest.approx([6 if "kl" in name else 3] * len(case["loss"])), name
    assert cases["gspo"]["clipped"][0] == 0 and max(cases["gspo"]["clipped"]) > 0  # the clip was reached, or the test shows less
    assert max(cases["ppo"]["clipped"]) > 0 and min(cases["gspo_kl"]["kl"]) > 1e-4
    assert answer["moved"] > 1e-3 and answer["parameter_gap"] < 5e-5
    # The weights have moved since the rollouts: only the ratio to the captured log-probabilities is Eq. 1.
    assert abs(recomputed["loss"][0] - recomputed["by_hand"][0]) > 1e-3
