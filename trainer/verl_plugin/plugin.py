"""What verl imports in every process: registers our trainers, engines and rollout backends, and on a CPU its platform too."""

from __future__ import annotations

import os
from typing import Any

ON_CPU = os.environ.get("VERL_PLATFORM") == "cpu"
"""verl's own switch."""


def _vllm_replica() -> Any:
    from .rollout_vllm import VllmReplica  # vLLM need not be installed

    return VllmReplica


if ON_CPU:
    from . import platform_cpu  # noqa: F401  before anything asks verl for its platform

from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

from . import routing_replay, trainer  # noqa: E402, F401

RolloutReplicaRegistry.register("vllm", _vllm_replica)

if ON_CPU:
    from . import transport  # noqa: F401
    from .rollout_cpu import register_backend

    register_backend()
