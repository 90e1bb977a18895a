"""How a capture looks from outside: the record that the trial page shows and the counts that the audit adds up.

The tokens lie beside it in the capture file (`capturefile`), from which this record can be made again, but for the harness's
log. It holds text and numbers of what went through the proxy, so never a gold patch or a test.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from .harnesslog import HarnessLog
from .trials import ArtifactRef


class BranchReason(StrEnum):
    """Why a branch of the message graph starts."""

    ROOT = "root"
    """The first call of the parent's conversation."""
    SUB_AGENT = "sub_agent"
    """The first call of another conversation."""
    AUXILIARY = "auxiliary"
    """A side call of the harness."""
    SUMMARY = "summary"
    """The call that writes the summary of a compaction."""
    COMPACTION = "compaction"
    """Older turns gave way to a summary, or were left out."""
    TOOLS_CHANGED = "tools_changed"
    HISTORY_EDITED = "history_edited"
    """Something that was in the history is there in another form: pruned, with an inserted turn, with another system prompt."""
    MALFORMED_TURN = "malformed_turn"
    """The harness dropped the newest turn, or put its own version of a call in its place that was none."""
    RETRY = "retry"
    """The same request was sampled again."""
    TEMPLATE_STRIP = "template_strip"
    """The chat template drops reasoning of earlier turns here, or the renderer cannot extend the turn before."""


class BranchClass(StrEnum):
    """Whose tokens a branch trains."""

    POLICY = "policy"
    SUB_AGENT = "sub_agent"
    SUMMARY = "summary"
    AUXILIARY = "auxiliary"


class Drift(StrEnum):
    """How the arguments of a turn's calls differ from what was sampled when the harness sends the turn back. Never changes a token."""

    RESERIALISED = "reserialised"
    """The same values after what harnesses are known to do to them: key order, number form, added defaults, trimmed lines."""
    EDITED = "edited"


class Exclusion(StrEnum):
    """Why sampled tokens of a scored trial did not enter the loss."""

    ZERO_ADVANTAGE = "zero_advantage"
    UNDELIVERED = "undelivered"
    OVER_BUDGET = "over_budget"
    AUXILIARY = "auxiliary"
    UNALIGNED = "unaligned"
    """Its history was rewritten, and the run trains the parent's exact history only."""
    STALE = "stale"
    """Its group was unfinished, or one too many, when the last step that may train it had its batch."""
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
    answers: list[str] = Field(default_factory=list)
    """Of each of them the id of the tool call whose result it is, or empty. Captures of before have none."""
    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCallRecord] = Field(default_factory=list)
    prompt_tokens: int
    sampled_tokens: int
    finish: str
    delivered: bool = True
    policy_version: int = 0
    """Of the first sampled token."""
    drift: Drift | None = None
    policy_versions: list[tuple[int, int]] = Field(default_factory=list)
    """(offset in the sampled tokens, policy version), ascending from 0."""
    started: float | None = None
    """When the proxy asked the engine, Unix seconds."""
    finished: float | None = None
    """When the engine had answered."""


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
    drift: dict[Drift, int] = Field(default_factory=dict)
    """Turns that this branch owns whose arguments came back different, by how."""


class ContextTokens(BaseModel):
    role: str
    ids: list[int]


class TurnTokens(BaseModel):
    """Ids of one model call that were new to it, in order: `context` and `scaffold` (the generation prompt) were sent, `sampled` came back
    and is what the mask holds, with one log-prob each. `start` is the position of the first."""

    turn: int
    start: int
    context: list[ContextTokens]
    scaffold: list[int]
    sampled: list[int]
    log_probs: list[float]
    policy_versions: list[tuple[int, int]]


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
    file: ArtifactRef | None = None
    """The capture file; None when the run does not keep it (`reporting.keep_captures`) or the disk was full."""
    log: HarnessLog | None = None
    """What the harness's own log says of the trial. No token and no outcome depends on it."""
