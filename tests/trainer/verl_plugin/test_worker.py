from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.models import make_model
from tests.trainer.verl_plugin.update_probe import SHAPES

END_TO_END = {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}
"""verl's names for the engine that GPUs have, which lays rows end to end."""


def answers(path: Path, ranks: int, *models: str, **variables: str) -> Any:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.trainer.verl_plugin.update_probe", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
    environment["OMP_NUM_THREADS"] = "1"
    logs = [(path / f"rank-{rank}.log").open("w") for rank in range(ranks)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), *models], stdout=log, stderr=subprocess.STDOUT, env=environment)
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait() for process in processes]
    outputs = [Path(log.name).read_text() for log in logs]
    assert codes == [0] * ranks, "\n".join(output[-3000:] for output in outputs)
    return json.loads(outputs[0].splitlines()[-1])


@pytest.mark.slow
def test_updates_follow_every_objective_over_branches_with_failures_present(tmp_path: Path) -> None:
    """Optimizer steps on rollouts with several branches, in several micro-batches, equal plain autograd on the formulas."""
    make_model(moe=True, tied=False).save_pretrained(tmp_path)
    (answer,) = answers(tmp_path, 1, str(tmp_path), "1")
    check(answer)


@pytest.mark.slow
def test_updates_of_two_ranks_do_too(tmp_path: Path) -> None:
    """The branches of a rollout lie on both; there are an odd number of rows, mini-batches with no row on one rank, and one row in all.

    Then both share each sequence. verl splits those for flash attention alone, so that model's attention says nothing and learns nothing.
    """
    whole, split = tmp_path / "whole", tmp_path / "split"
    model = make_model(moe=True, tied=False)
    model.save_pretrained(whole)
    for name, parameter in model.named_parameters():
        if "v_proj" in name or "o_proj" in name:
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(split)
    apart, together = answers(tmp_path, 2, str(whole), "1", str(split), "2", **END_TO_END)
    check(apart)
    check(together)
    assert (together["aligned"], together["misaligned"]) == (sum(map(sum, SHAPES)), 0)  # tokens with the routes meant for them


def check(answer: dict[str, Any]) -> None:
    cases = answer["cases"]
    recomputed = cases.pop("gspo_recomputed")
    for name, case in cases.items():
        assert case["loss"] == pytest.approx(case["by_hand"]["loss"], abs=1e-6), name
        assert case["grad_norm"] == pytest.approx(case["by_hand"]["grad_norm"], rel=1e-4), name
        if name not in ("gspo_apart", "gspo_alone"):
            assert case["rollouts"] == pytest.approx([6 if "kl" in name else 3] * len(case["loss"])), name
    assert cases["gspo_apart"]["rollouts"] == pytest.approx([1] * 3), "the fourth mini-batch is empty"
    assert cases["gspo"]["clipped"][0] == 0 and max(cases["gspo"]["clipped"]) > 0  # the clip was reached, or the test shows less
    assert max(cases["ppo"]["clipped"]) > 0 and min(cases["gspo_kl"]["kl"]) > 1e-4
    assert answer["moved"] > 1e-3 and answer["parameter_gap"] < 5e-5
    # The weights have moved since the rollouts: only the ratio to the captured log-probabilities is Eq. 1.
    assert abs(recomputed["loss"][0] - recomputed["by_hand"]["loss"][0]) > 1e-3
    assert max(answer[f"{look}_gap"] for look in ("probe", "present", "alone", "first", "again")) < 1e-4
