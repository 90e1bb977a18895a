"""A policy that reads from a script: what `python -m trainer.scripted` plays behind the real proxy, for checks of harnesses.

Orders and answers are one JSON object a line, over standard input and output; the harness talks to the proxy by HTTP as always.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer

from .capture import CaptureRecord
from .trials import Identifier


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ScriptedCall(_Part):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ScriptedTurn(_Part):
    """One sampled turn: text, then tool calls."""

    text: str = ""
    calls: list[ScriptedCall] = Field(default_factory=list)


class Voice(_Part):
    """The turns of one conversation, in order. A call belongs to the first voice whose `says` all stand in its prompt and whose `unless`
    do not; when the turns are used up, the last one is said again."""

    name: str
    says: list[str] = Field(default_factory=list)
    unless: list[str] = Field(default_factory=list)
    turns: list[ScriptedTurn] = Field(min_length=1)


class ScriptedLimits(_Part):
    """The rollout section's limits by their names there, in tokens but for the turns."""

    max_turns: int = 200
    prompt_budget: int | None = None
    response_budget: int | None = None
    token_budget: int | None = None


class ScriptedOrder(_Part):
    """Open one rollout. Answered by `ScriptedReady`; the next line, of any content, closes it and is answered by `ScriptedEnd`."""

    rollout_id: Identifier
    key: SecretStr
    harness: Identifier
    context: int
    """Longest sequence in tokens. Every byte is one token here, so prompts are four times as long as with a real vocabulary."""
    max_tokens: int = 20_000
    limits: ScriptedLimits = Field(default_factory=ScriptedLimits)
    voices: list[Voice] = Field(min_length=1)

    @field_serializer("key", when_used="json")
    def _reveal(self, key: SecretStr) -> str:
        return key.get_secret_value()


class ScriptedReady(_Part):
    url: str


class ScriptedEnd(_Part):
    """What the rollout came to. `spoken` counts the turns by voice."""

    record: CaptureRecord
    spoken: dict[str, int]
    turn_cap_hit: bool
    over_length: bool
    error: str = ""
    """Why the engine or the proxy failed; empty when neither did."""
