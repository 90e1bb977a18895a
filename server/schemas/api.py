"""REST bodies of the control plane, by noun. The plugin and the CLI speak only these."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .checks import CheckReport, Verdict
from .outcome import Outcome, Stage
from .states import Phase, RunState, TrialState
from .trials import StageTiming


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SpecRequest(_Body):
    """A RunSpec as the user wrote it: a preset name and overrides, or a document that may say `extends`."""

    document: dict[str, Any] = Field(default_factory=dict)
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Dotted field → value, applied last."""
    base: str = ""
    """Directory that relative paths in the document refer to."""


class CheckRequest(SpecRequest):
    skip_slow: bool = False
    """Leave out the checks that start sandboxes."""


class CheckJob(_Body):
    """Answer of `POST /api/checks` and `GET /api/checks/{id}` (`?wait=s`): checks that start sandboxes outlast a request."""

    check_id: str
    report: CheckReport | None
    """None while the checks run."""


class StartRequest(_Body):
    digest: str


class StepForming(_Body):
    """The step (or evaluation) whose trials are under way."""

    step: int
    phase: Phase
    expected: int
    done: int
    failed: int
    failures: dict[str, int] = Field(default_factory=dict)
    """Cause → count."""


class Point(_Body):
    step: int
    value: float
    n: int
    low: float | None = None
    high: float | None = None


class RunSummary(_Body):
    run_id: str
    name: str
    state: RunState
    reason: str
    created: float
    started: float | None
    finished: float | None
    steps_done: int
    steps_expected: int
    trials: int
    failed: int


class HarnessStatus(_Body):
    """One harness of a mixed run. `fidelity` (mean absolute difference of log-probabilities) and `turns` (mean) are of the last step."""

    harness: str
    groups: int
    trials: int
    failed: int
    outcomes: dict[str, int]
    """Termination of scored trials and cause of failed ones → count."""
    train_reward: list[Point]
    held_out: list[Point]
    fidelity: float | None
    turns: float | None


class RunStatus(RunSummary):
    """What `/rl:status` shows."""

    summary: str
    forming: StepForming | None
    train_reward: list[Point]
    held_out: list[Point]
    outcomes: dict[str, int]
    harnesses: list[HarnessStatus] = Field(default_factory=list)
    """Of a mixed run; empty when all trials ran in one harness."""
    last_metrics: dict[str, float]
    last_event: float | None
    problem: str = ""
    """First error of a failed run, one line, and what to do."""


class StepRow(_Body):
    """One row of `GET /api/runs/{id}/steps`: a finished optimizer step."""

    step: int
    time: float
    metrics: dict[str, float]


class TrialRow(_Body):
    trial_id: str
    group_id: str | None
    step: int | None
    phase: Phase | None
    task: str
    harness: str
    sample: int | None
    state: TrialState
    stage: Stage
    outcome: Outcome | None
    turns: int | None
    sampled_tokens: int | None
    started: float | None
    finished: float | None


class CaptureInfo(_Body):
    """Counts of a trial's capture. `GET …/trials/{id}/capture` answers the record itself."""

    turns: int
    branches: int
    sampled_tokens: int
    tool_calls: int
    malformed_turns: int


class TrialDetail(TrialRow):
    timings: list[StageTiming]
    capture: CaptureInfo | None


class LogFile(_Body):
    name: str
    size: int


class LogTail(_Body):
    name: str
    lines: list[str]


class ReviewRequest(_Body):
    verdict: Verdict
    note: str = ""


class DiagnoseRequest(_Body):
    explain: bool = False
    """Ask the language model configured for the server to rank and explain."""


class ServerInfo(_Body):
    version: str
    data_dir: str
    database: str
    needs_token_to_read: bool
