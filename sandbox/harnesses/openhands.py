"""OpenHands SDK, unmodified: its default agent in a Python process of its own, run by `openhands_program.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, override

from sandbox.integrity.environment import TrialEnvironment
from server.schemas.harnesslog import LogEventKind

from .base import STREAM, HarnessAgent
from .logs import Entry, LogBook
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
    reads: ClassVar[tuple[str, ...]] = (STREAM,)
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

    @classmethod
    @override
    def note(cls, entry: Entry, book: LogBook) -> bool:
        call_id, tool, time = entry.text("tool_call_id"), entry.text("tool_name"), entry.time("timestamp")
        match entry.text("kind"):
            case "ActionEvent":
                book.began(call_id, tool, time)
                if entry.text("action", "kind") == "TaskAction":
                    kind = entry.text("action", "subagent_type")
                    book.note(LogEventKind.SUB_AGENT, entry.text("action", "description"), name=kind, call_id=call_id)
            case "ObservationEvent":
                seen = entry.at("observation")
                book.ended(call_id, time, seen.at("is_error").value is not True and seen.number("exit_code") in (None, 0))
            case "AgentErrorEvent":
                book.ended(call_id, time, False)
                book.note(LogEventKind.ERROR, entry.text("error"), name=tool, call_id=call_id)
            case "UserRejectObservation":
                book.ended(call_id, time, False)
                book.note(LogEventKind.DENIED, entry.text("rejection_reason"), name=tool, call_id=call_id)
            case "ConversationErrorEvent":
                book.note(LogEventKind.ERROR, entry.text("detail"), name=entry.text("code"))
            case "Condensation":
                book.note(LogEventKind.COMPACTION, f"{len(entry.items('forgotten_event_ids'))} events forgotten")
            case "Began":  # this and the next by our program
                book.named(entry.text("version"))
            case "Ended":
                book.stopped(entry.text("status"))
                book.log.turns = entry.count("turns")
                book.log.cost_usd = entry.number("cost_usd")
            case kind:
                return kind in ("SystemPromptEvent", "MessageEvent", "CondensationRequest", "ConversationStateUpdateEvent")
        return True
