"""The environment variables through which Ray, verl, torch and transformers are configured; nothing of ours is."""

from __future__ import annotations

import os
import secrets
import sys

SETTINGS = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "trainer.verl_plugin.plugin",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # jemalloc would start a thread in the process that workers are forked from
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_METRICS_COLLECTION": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
}
FOREIGN = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK", "PYTHONDONTWRITEBYTECODE")
"""Removed: what would attach us to somebody else's cluster, and what makes every import of torch compile from source."""


def apply() -> None:
    """Must run before the first import of ray: its C++ part reads the token once per process."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
    sys.dont_write_bytecode = False
