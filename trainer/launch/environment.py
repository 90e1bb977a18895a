"""The environment variables through which Ray, verl, torch and transformers are configured; nothing of ours is."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Literal

from server.schemas.rundir import RunDir

EVERYWHERE = {
    "VERL_USE_EXTERNAL_MODULES": "trainer.verl_plugin.plugin",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_METRICS_COLLECTION": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
ON_CPU = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # jemalloc would start a thread in the process that workers are forked from
}
ON_GPUS = {
    "VERL_PLATFORM": "nvidia",  # verl would ask nvidia-smi in every process, and a node without a GPU has none
    "VLLM_NO_USAGE_STATS": "1",
}
OWN_CLUSTER = {
    "RAY_AUTH_MODE": "token",
    "RAY_task_events_report_interval_ms": "0",
}
"""For a cluster of the run's own. Ray would keep the history of the last 100,000 tasks for its dashboard, which does not run here: two
thirds of a megabyte per step."""
FOREIGN = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK")
"""Removed for a cluster of our own: what would attach us to somebody else's."""


def settings(device: Literal["cpu", "cuda"]) -> dict[str, str]:
    return EVERYWHERE | (ON_CPU if device == "cpu" else ON_GPUS)


def of_trackers(run: RunDir) -> dict[str, str]:
    """Where experiment trackers write that were not told otherwise: below the run's directory."""
    home = run.root / "tracking"
    places = {"TENSORBOARD_DIR": f"{home}/tensorboard", "WANDB_DIR": f"{home}", "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db"}
    return {name: value for name, value in places.items() if name not in os.environ}


def apply(device: Literal["cpu", "cuda"], *, own_cluster: bool) -> None:
    """Must run before the first import of ray: its C++ part reads the token once per process. A Ray cluster that exists has a token of
    its own, which the caller's environment holds."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it makes every import of torch compile from source
    os.environ.update(settings(device))
    if own_cluster:
        for name in FOREIGN:
            os.environ.pop(name, None)
        os.environ.update(OWN_CLUSTER, RAY_AUTH_TOKEN=secrets.token_hex(32))
    sys.dont_write_bytecode = False
