"""Where the time of a trial goes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Part(StrEnum):
    """What a trial spends time on, beside waiting for a place to run. `other`: collecting the diff, and all between stages."""

    SANDBOX_SETUP = "sandbox_setup"
    AGENT_SETUP = "agent_setup"
    AGENT = "agent"
    VERIFICATION = "verification"
    OTHER = "other"


class StageShare(BaseModel):
    """Mean seconds per ended trial of a run, and the share of the whole."""

    model_config = ConfigDict(extra="forbid")

    part: Part
    seconds: float
    share: float
