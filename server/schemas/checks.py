"""Checks before a run, the plan that a run starts from, and findings after."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


class Check(BaseModel):
    """One result. `where` names the RunSpec field or the machine part; `fix` is what to do, empty when nothing is wrong."""

    model_config = ConfigDict(extra="forbid")

    code: str
    level: Level
    where: str
    message: str
    fix: str = ""


class CheckReport(BaseModel):
    """`ok` is false when any check is an error."""

    model_config = ConfigDict(extra="forbid")

    ok: bool
    summary: str
    checks: list[Check]


class Plan(BaseModel):
    """What `start_run` will do. Starting needs the digest of a plan that was shown: the SHA-256 of the canonical resolved spec."""

    model_config = ConfigDict(extra="forbid")

    digest: str
    summary: str
    spec: dict[str, Any]
    provenance: dict[str, str]
    """Dotted field → `default`, `preset NAME`, `file PATH` or `override`."""
    expected_trials: int


class ResolvedSpec(BaseModel):
    """What a document and its overrides amount to; nothing was looked at on any machine."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any]
    provenance: dict[str, str]
    """As in `Plan`."""


class Verdict(StrEnum):
    """A person's decision about a finding."""

    CONFIRMED = "confirmed"
    REJECTED = "rejected"


class Evidence(BaseModel):
    """One citable row: `id` is what a statement must refer to (`step:7`, `trial:abc`, `group:xyz`)."""

    model_config = ConfigDict(extra="forbid")

    id: str
    text: str
    values: dict[str, float | int | str] = Field(default_factory=dict)


class Finding(BaseModel):
    """A detector's candidate, for a person to confirm or reject. It never states a cause as a fact."""

    model_config = ConfigDict(extra="forbid")

    id: str
    detector: str
    title: str
    detail: str
    fault: str
    evidence: list[Evidence]
    verdict: Verdict | None = None
    note: str = ""


class Diagnosis(BaseModel):
    model_config = ConfigDict(extra="forbid")

    run_id: str
    summary: str
    findings: list[Finding]
    explanation: str | None = None
    """Written by a language model when asked for; every number in it resolves to an evidence id."""
    checked: list[str] = Field(default_factory=list)
    """Detectors that ran, also those that found nothing."""
