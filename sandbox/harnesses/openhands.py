"""OpenHands SDK, unmodified: its default agent in a Python process of its own, run by `openhands_program.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, override

from sandbox.integrity.environment import TrialEnvironment

from .base import HarnessAgent
from .pins import OPENHANDS, Pin
from .selfcontained import python_of

_PROGRAM = Path(__file__).with_name("openhands_program.py")
_SETTINGS = {
    "IS_SANDBOX": "1",
    "TERM": "dumb",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENHANDS_SUPPRESS_BANNER": "1",
}


class OpenHands(HarnessAgent):
    pin: ClassVar[Pin | None] = OPENHANDS
    memory_mb: ClassVar[int] = 512

    @staticmethod
    @override
    def name() -> str:
        return OPENHANDS.name

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        order = {
            "instruction": instruction,
            "url": self.api_url(environment, "/v1"),
            "key": self.rollout.proxy.key.get_secret_value(),
            "workspace": environment.workdir,
            "max_input_tokens": max(1, self.rollout.context - self.rollout.max_output_tokens),
        }
        # `-I`: what the task has in its work directory is not imported, and the agent's own programs do not inherit the rule.
        argv = [python_of(self.tree), "-I", "-B", "-c", _PROGRAM.read_text(encoding="utf-8"), str(self.tree)]
        await self.start(environment, argv, _SETTINGS, json.dumps(order))
