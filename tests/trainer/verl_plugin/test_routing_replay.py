from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.models import VOCAB, make_model
from trainer.learning.fidelity import fidelity
from trainer.r3.control import sample


@pytest.mark.slow
def test_verls_engine_replays_the_routes_of_a_bf16_sampler(tmp_path: Path) -> None:
    model = make_model(moe=True, tied=False, hidden_size=128, num_hidden_layers=4, head_dim=32, moe_intermediate_size=64)
    model.save_pretrained(tmp_path / "model")
    draws = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCAB, (16,), generator=draws).tolist()
    rollout = sample(copy.deepcopy(model).to(torch.bfloat16), prompt, 384, draws)
    routes = torch.cat([rollout.routes, torch.zeros_like(rollout.routes[:1])])  # the last token was never an input
    case = {"tokens": rollout.tokens, "prompt_len": 16, "routes": routes.tolist()}
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
    answers = json.loads(done.stdout.splitlines()[-1])
    side_by_side, end_to_end = answers["cpu"], answers["cuda"]
    for name in ("own", "replay", "shifted"):
        assert np.abs(np.subtract(side_by_side[name], end_to_end[name])).max() < 1e-3, name
        assert end_to_end[f"{name}_counts"]["replayed"] == side_by_side[f"{name}_counts"]["replayed"]
    for answer in answers.values():
        check(answer, rollout.log_probs)


def check(answer: dict[str, Any], sampled: Sequence[float]) -> None:
    # Two rows of 400 tokens in 4 layers; the last token of each has no route.
    own, replayed = answer["own_counts"], answer["replay_counts"]
    assert (own["replayed"], own["changed"], own["native"]) == (0, 0, 0)
    assert (replayed["replayed"], replayed["native"]) == (2 * 399 * 4, 2 * 4)
    assert 0 < replayed["changed"] < 0.2 * 2 * 399 * 4
    assert replayed["top1"] > 0.985 and 0.98 < replayed["overlap"] < 1
    names, everything = ("own", "replay", "shifted"), [True] * 384
    off, aligned, shifted = (fidelity(sampled, answer[name], everything) for name in names)
    assert aligned.k3 < off.k3 / 4
    assert aligned.mean_abs < 0.7 * off.mean_abs and aligned.p99_abs < off.p99_abs
    assert shifted.mean_abs > 8 * off.mean_abs
    assert shifted.pearson < off.pearson < aligned.pearson
