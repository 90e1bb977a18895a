"""What verl imports in every process: registers the CPU platform, engine, rollout backends and trainers."""

from __future__ import annotations

import os
from typing import Any


def _vllm_replica() -> Any:
    from .rollout_vllm import VllmReplica  # vLLM need not be installed

    return VllmReplica


if os.environ.get("VERL_PLATFORM") == "cpu":  # verl's own switch; the platform must be there before the first get_platform()
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from . import platform_cpu, routing_replay, trainer, transport  # noqa: F401
    from .rollout_cpu import register_backend

    register_backend()
    RolloutReplicaRegistry.register("vllm", _vllm_replica)
