"""Training on GPUs as far as it goes without one: the classes that verl finds, and where a run stops that was told nothing is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from server.schemas.events import RunStateBody
from server.schemas.runspec import Algorithm, Reporting, Rollout, Trainer
from server.schemas.states import RunState
from tests.trainer.support.main_ppo import SIZE, TASKS, World, left_behind, prepare
from tests.trainer.support.tiny_policy import save_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: python -m tests.vllm.on_gpu"),
]
CONFIGS = {"single-node": "FSDPActorConfig", "paper-qwen3.5-35b": "VeOmniActorConfig", "megatron": "McoreActorConfig"}
WORKER = "trainer.verl_plugin.worker.LegoWorker"


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.trainer.launch.gpu_probe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_verl_takes_our_classes_for_every_preset_on_gpus() -> None:
    done = probe("classes", *CONFIGS)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == ["cuda", "nvidia"]
    for preset, config in CONFIGS.items():
        mine = found[preset]
        assert mine["configs"] == [config, config, "RolloutConfig", "CheckpointEngineConfig"]
        assert (mine["replica"], mine["manager"]) == ("trainer.verl_plugin.plugin", "trainer.rollout.manager.RolloutManager")
        assert mine["dataset"] == "trainer.verl_plugin.dataset.TaskDataset"
        assert set(mine["workers"].values()) == {WORKER}
    assert found["single-node"]["trainer"].endswith("LegoSync") and found["single-node"]["workers"].keys() == {"actor_rollout"}
    assert found["single-node"]["engine"] == "trainer.verl_plugin.routing_replay.ReplayEngine"
    for preset in ("paper-qwen3.5-35b", "megatron"):  # with a KL term the reference is a worker of its own
        assert found[preset]["trainer"].endswith("LegoAsync") and found[preset]["workers"].keys() == {"actor", "ref"}


def test_a_run_stops_where_the_first_worker_asks_for_its_gpu(bare_world: World, tmp_path: Path) -> None:
    """Launcher, Ray, verl's trainer, its data, the TransferQueue and the worker's process are up by then."""
    world, policy = bare_world, tmp_path / "policy"
    save_policy(policy, dense=True, tied=False, head_dim=64)
    prepare(
        world,
        policy,
        rollout=Rollout(tasks_per_step=TASKS, group_size=SIZE, max_new_tokens=8, max_turns=4, engine="vllm"),
        algorithm=Algorithm(routing_replay=False),
        trainer=Trainer(device="cuda", attention="sdpa", steps=1),
        reporting=Reporting(),
    )
    done = probe("launch", str(world.run.root))
    assert (done.returncode, done.stdout) == (1, "failed: ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!\n")
    (state,) = world.server.bodies()
    assert isinstance(state, RunStateBody) and state.state is RunState.FAILED and f"failed: {state.reason}\n" == done.stdout
    assert "trainer/verl_plugin/worker.py" in (world.run.logs / "verl.log").read_text()
    assert left_behind(world) == []
