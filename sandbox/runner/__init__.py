"""The trial runner: an HTTP service that executes trials with Harbor and decides their outcomes."""

from __future__ import annotations

import logging
import os


def quiet() -> None:
    """Set this process up for Harbor; call before Harbor is imported.

    No telemetry, no fetching of price lists, and none of the caller's endpoints and keys: Harbor passes what it finds on to agents.
    """
    for name in [name for name in os.environ if name.startswith(("OPENAI_", "ANTHROPIC_", "LITELLM_", "MSWEA_"))]:
        del os.environ[name]
    os.environ.update({"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    harbor = logging.getLogger("harbor")  # each trial's own log file stays
    harbor.propagate = False
    harbor.addHandler(logging.NullHandler())
