"""The runner's HTTP interface: `POST /trials` → 202, `GET /trials/{id}?wait=s` (long poll), `DELETE /trials/{id}`, `GET /healthz`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer

from .harnesslog import HarnessLog
from .outcome import Outcome, Stage
from .states import TrialState

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""Ids that may become a file name: no separator, no leading dot."""


class ProxyEndpoint(BaseModel):
    """Where the harness finds its model: one URL and one long random key per rollout."""

    model_config = ConfigDict(extra="forbid")

    url: str
    key: SecretStr

    @field_serializer("key", when_used="json")
    def _reveal(self, key: SecretStr) -> str:
        return key.get_secret_value()


class Budgets(BaseModel):
    """Deadlines of one trial, in seconds of wall clock per stage."""

    model_config = ConfigDict(extra="forbid")

    sandbox_setup_s: float = Field(default=60, gt=0)
    agent_setup_s: float = Field(default=60, gt=0)
    agent_s: float = Field(default=300, gt=0)
    verifier_s: float = Field(default=300, gt=0)


class TrialRequest(BaseModel):
    """One sandboxed execution. Idempotent on `trial_id`: the same id twice is the same trial."""

    model_config = ConfigDict(extra="forbid")

    trial_id: Identifier
    task: Identifier
    split: Identifier = "train"
    harness: Identifier
    proxy: ProxyEndpoint
    budgets: Budgets = Field(default_factory=Budgets)
    seed: int = 0


class StageTiming(BaseModel):
    """Unix seconds; `finished` is None while the stage runs."""

    model_config = ConfigDict(extra="forbid")

    stage: Stage
    started: float
    finished: float | None = None


class ArtifactRef(BaseModel):
    """A file under the run's directory, named relative to it."""

    model_config = ConfigDict(extra="forbid")

    name: str
    path: str
    size: int
    sha256: str


class TrialView(BaseModel):
    """The runner's answer. `outcome` is the runner's half: the trainer decides turn cap, overflow and zero model calls from the capture."""

    model_config = ConfigDict(extra="forbid")

    trial_id: Identifier
    state: TrialState
    stage: Stage
    outcome: Outcome | None = None
    exit_code: int | None = None
    timings: list[StageTiming] = Field(default_factory=list)
    artifacts: list[ArtifactRef] = Field(default_factory=list)
    log: HarnessLog | None = None
    """What the harness's own log says; None when it left none, or keeps one that its adapter does not read."""


class RunnerHealth(BaseModel):
    """`GET /healthz` of the runner. `boot` changes when the process was restarted: trials of an earlier boot are lost."""

    model_config = ConfigDict(extra="forbid")

    boot: str
    live: int
    limits: str
    """How limits are enforced here: `cgroup` or `rlimit`."""
