"""What a harness's own log says, in the same words for every harness.

The log is written inside the sandbox, where the agent could write it too: it explains a trial and decides nothing. Tokens come from the
capture alone. Everything here is bounded; texts hold no control characters.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TEXT = 500
"""Longest text, in characters."""
EVENTS = 1000
"""Most events that are kept of one log."""

Text = Annotated[str, Field(max_length=TEXT)]


class LogEventKind(StrEnum):
    TOOL = "tool"
    """A tool ran."""
    ERROR = "error"
    """Something went wrong in the harness: a failed or repeated model call, a turn that it could not use."""
    COMPACTION = "compaction"
    SUB_AGENT = "sub_agent"
    """A sub-agent was started."""
    DENIED = "denied"
    """The harness did not permit a call."""


class LogEvent(BaseModel):
    """`call_id` is the tool call's, where the harness keeps the proxy's; `turn` the number of the conversation's model call, from 0, where
    it does not. `ok` is the harness's word on how a tool ended."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    kind: LogEventKind
    call_id: Text = ""
    turn: int | None = None
    name: Text = ""
    """Of the tool, of the sub-agent's kind, of the error."""
    text: Text = ""
    started: float | None = None
    """Unix seconds by the sandbox's clock."""
    seconds: float | None = None
    ok: bool | None = None


class HarnessLog(BaseModel):
    """`events` in the order of the log."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: Text = ""
    """Of the harness, as it names itself."""
    end: Text = ""
    """Why it stopped, in its own word."""
    exit_code: int | None = None
    """As the host saw it; negative: a signal."""
    turns: int | None = None
    """Model calls or turns, as the harness counts."""
    cost_usd: float | None = None
    """What the harness thinks that its model calls cost."""
    seconds: float | None = None
    events: list[LogEvent] = Field(default_factory=list, max_length=EVENTS)
    dropped: int = 0
    """Events beyond the bound."""
    malformed: int = 0
    """Lines that are no JSON object, or too long."""
    unknown: int = 0
    """Records of kinds that the adapter does not know: its pinned version writes none."""
    truncated: bool = False
    """The log was longer than what is read of it, or ends within a record."""
