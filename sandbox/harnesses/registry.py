"""Harness adapters by the name that a RunSpec uses, and by import path."""

from __future__ import annotations

import importlib

from server.schemas.runspec import Harness

from .base import HarnessAgent
from .claude_code import ClaudeCode
from .codex import Codex
from .mini_swe_agent import MiniSweAgent
from .opencode import OpenCode
from .openhands import OpenHands
from .terminus import Terminus

HARNESSES: dict[str, type[HarnessAgent]] = {
    agent.name(): agent for agent in (MiniSweAgent, ClaudeCode, OpenCode, OpenHands, Codex, Terminus)
}


def adapter(harness: Harness) -> type[HarnessAgent]:
    """The class that runs a harness. Raises ValueError, saying what to put right."""
    if not harness.adapter:
        if harness.name not in HARNESSES:
            raise ValueError(f"harnesses: there is no adapter for {harness.name}; known are {', '.join(HARNESSES)}")
        return HARNESSES[harness.name]
    module, _, name = harness.adapter.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the module is anybody's code, and may raise anything while it is imported
        words = f"{type(error).__name__}: {error}"
        raise ValueError(f"harnesses: the adapter {harness.adapter} of {harness.name} cannot be imported: {words}") from error
    if not (isinstance(found, type) and issubclass(found, HarnessAgent)):
        raise ValueError(f"harnesses: the adapter {harness.adapter} is no subclass of sandbox.harnesses.base.HarnessAgent")
    return found
