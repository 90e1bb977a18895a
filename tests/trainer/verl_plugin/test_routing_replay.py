from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.learning.test_replay import check_gap, sample_in_bf16, tokens
from tests.trainer.models import make_model
from trainer.learning.fidelity import fidelity


@pytest.mark.slow
def test_verls_engine_replays_the_routes_of_a_bf16_sampler(tmp_path: Path) -> None:
    model = make_model(moe=True, tied=False, hidden_size=128, num_hidden_layers=4, head_dim=32, moe_intermediate_size=64)
    model.save_pretrained(tmp_path / "model")
    ids, rollout, routes = sample_in_bf16(model, tokens(0, 16), 384)
    routes = torch.cat([routes, torch.zeros_like(routes[:1])])  # the last token was never an input
    case = {"tokens": ids, "prompt_len": 16, "routes": routes.tolist()}
    (tmp_path / "case.json").write_text(json.dumps(case))

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tests.trainer.verl_plugin.replay_probe",
        str(tmp_path / "model"),
        str(tmp_path / "case.json"),
        str(port),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])

    # Two rows of 400 tokens in 4 layers; the last token of each has no route.
    assert answer["own_counts"] == {"replayed": 0, "changed": 0, "native": 0}
    assert answer["replay_counts"]["replayed"] == 2 * 399 * 4 and answer["replay_counts"]["native"] == 2 * 4
    assert 0 < answer["replay_counts"]["changed"] < 0.2 * 2 * 399 * 4
    everything = [True] * len(rollout)
    check_gap(*(fidelity(rollout, answer[name], everything) for name in ("own", "replay", "shifted")))
