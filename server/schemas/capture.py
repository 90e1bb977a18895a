"""How a capture looks from outside: the record that the trial page shows and the counts that the audit adds up.

Token arrays lie beside it in a `.npz`; this record holds text and numbers only, and never a gold patch or a test.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class BranchReason(StrEnum):
    """Why a branch of the message graph starts."""

    ROOT = "root"
    HISTORY_EDITED = "history_edited"
    MALFORMED_TURN = "malformed_turn"
    COMPACTION = "compaction"
    TOOLS_CHANGED = "tools_changed"
    SUB_AGENT = "sub_agent"
    RETRY = "retry"
    TEMPLATE_STRIP = "template_strip"


class BranchClass(StrEnum):
    POLICY = "policy"
    SUB_AGENT = "sub_agent"
    SUMMARY = "summary"
    AUXILIARY = "auxiliary"


class Exclusion(StrEnum):
    """Why sampled tokens of a scored trial did not enter the loss."""

    ZERO_ADVANTAGE = "zero_advantage"
    UNDELIVERED = "undelivered"
    OVER_BUDGET = "over_budget"
    AUXILIARY = "auxiliary"
    UNALIGNED = "unaligned"
    """Its history was rewritten, and the run trains the parent's exact history only."""
    OTHER_THREAD = "other_thread"
    """A sub-agent's, and the run trains the parent's conversation only."""


class ToolCallRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    name: str
    arguments: str
    status: str = "ok"


class TurnRecord(BaseModel):
    """One model call. `context` is the text that became new before it, `text` and `tool_calls` what the policy sampled."""

    model_config = ConfigDict(extra="forbid")

    index: int
    branch: int
    context: list[tuple[str, str]] = Field(default_factory=list)
    """(role, text) of the messages that this call added."""
    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCallRecord] = Field(default_factory=list)
    prompt_tokens: int
    sampled_tokens: int
    finish: str
    delivered: bool = True
    policy_version: int = 0
    """Of the first sampled token."""
    policy_versions: list[tuple[int, int]] = Field(default_factory=list)
    """(offset in the sampled tokens, policy version), ascending from 0."""


class BranchRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    index: int
    reason: BranchReason
    branch_class: BranchClass
    tokens: int
    sampled_tokens: int
    excluded: Exclusion | None = None
    min_version: int = 0
    max_version: int = 0
    """Policy versions of the sampled tokens that this branch owns."""


class CaptureRecord(BaseModel):
    """`captures/<trial_id>.json` under the run's directory. Sum of `branches.sampled_tokens` = `sampled_tokens`."""

    model_config = ConfigDict(extra="forbid")

    trial_id: str
    harness: str
    turns: list[TurnRecord]
    branches: list[BranchRecord]
    sampled_tokens: int
    violations: list[str] = Field(default_factory=list)
    unknown_fields: list[str] = Field(default_factory=list)
