"""What verl imports in every process: registers the CPU platform, engine, rollout backend and trainer."""

from __future__ import annotations

import os

if os.environ.get("VERL_PLATFORM") == "cpu":  # verl's own switch; the platform must be there before the first get_platform()
    from . import platform_cpu, routing_replay, trainer, transport  # noqa: F401
    from .rollout_cpu import register_backend

    register_backend()
