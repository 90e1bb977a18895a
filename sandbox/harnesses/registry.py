"""Harness adapters by the name that a RunSpec uses."""

from __future__ import annotations

from .base import HarnessAgent
from .claude_code import ClaudeCode
from .mini_swe_agent import MiniSweAgent

HARNESSES: dict[str, type[HarnessAgent]] = {agent.name(): agent for agent in (MiniSweAgent, ClaudeCode)}
