"""Events that trainer and runner report. Idempotent on (run, source, seq): a batch may be sent again without harm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .machine import MachineFinding
from .outcome import Outcome, Scored, Stage
from .states import Phase, RunState, TrialState

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""What becomes a key of a table: printable, on one line."""
Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Body(BaseModel):
    # A metric may be NaN or infinite; plain JSON has neither and would turn them into an event that no one can read back.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class RunStateBody(_Body):
    type: Literal["run_state"] = "run_state"
    state: RunState
    reason: str = ""


class WaitingBody(_Body):
    """What the run waits for before it can go on, such as machines of a cluster; "" when it waits no more."""

    type: Literal["waiting"] = "waiting"
    reason: str


class ResumedBody(_Body):
    """A trainer that died was started again from the checkpoint after `step` updates, for the `attempt`-th time in all. What was
    reported of later steps is superseded."""

    type: Literal["resumed"] = "resumed"
    step: Count
    attempt: Count


class StepBody(_Body):
    """A finished optimizer step. Metric names follow verl's (`actor/grad_norm`, `training/rollout_actor_probs_pearson_corr`)."""

    type: Literal["step"] = "step"
    step: Count
    metrics: dict[Name, float]


class EvaluationBody(_Body):
    """A finished held-out evaluation, taken with the weights after `step` updates. `executed` excludes failed trials."""

    type: Literal["evaluation"] = "evaluation"
    step: Count
    resolved: Count
    executed: Count
    total: Count
    metrics: dict[Name, float] = Field(default_factory=dict)


class GroupBody(_Body):
    """G rollouts of one (task, harness) begin."""

    type: Literal["group"] = "group"
    group_id: Name
    step: Count
    phase: Phase
    task: Name
    harness: Name
    size: Count


class TrialBody(_Body):
    """A trial changed state or stage."""

    type: Literal["trial"] = "trial"
    trial_id: Name
    state: TrialState
    stage: Stage
    group_id: Name | None = None
    """Set by the trainer with the first event of a trial; the runner leaves it out."""
    sample: Count | None = None


class OutcomeBody(_Body):
    """The final outcome, as the trainer admitted it."""

    type: Literal["outcome"] = "outcome"
    trial_id: Name
    outcome: Outcome


class StageTimingBody(_Body):
    type: Literal["stage_timing"] = "stage_timing"
    trial_id: Name
    stage: Stage
    started: float
    finished: float


class CaptureBody(_Body):
    """Where the capture of a trial lies, relative to the run's directory, and its counts."""

    type: Literal["capture"] = "capture"
    trial_id: Name
    path: str
    size: Count
    sha256: str
    turns: Count
    branches: Count
    sampled_tokens: Count
    tool_calls: Count
    malformed_turns: Count = 0


class ArchiveBody(_Body):
    """Where the diff that a trial is graded from lies, relative to the run's directory."""

    type: Literal["archive"] = "archive"
    trial_id: Name
    path: str
    size: Count
    sha256: str


class RegradeBody(_Body):
    """A further verdict on the archived diff of a trial. `inputs` is the SHA-256 of all that it was reached from: diff, tree, tests and
    grader. The same inputs are graded once per verifier; the verdict that was said last counts. What could not be graded is none."""

    type: Literal["regrade"] = "regrade"
    trial_id: Name
    verifier: Literal["separate", "shared"]
    inputs: Name
    outcome: Scored


class MachineBody(_Body):
    """What a runner sees of the machine that it runs on; the newest one of a host counts."""

    type: Literal["machine"] = "machine"
    host: Name
    findings: list[MachineFinding]
    facts: dict[Name, float] = Field(default_factory=dict)


class FindingBody(_Body):
    type: Literal["finding"] = "finding"
    detector: Name
    title: str
    step: Count | None = None
    evidence: list[str] = Field(default_factory=list)


class LogBody(_Body):
    """A log file of the run exists, relative to the run's directory."""

    type: Literal["log"] = "log"
    name: Name
    path: str


EventBody = Annotated[
    RunStateBody
    | WaitingBody
    | ResumedBody
    | StepBody
    | EvaluationBody
    | GroupBody
    | TrialBody
    | OutcomeBody
    | StageTimingBody
    | CaptureBody
    | ArchiveBody
    | RegradeBody
    | MachineBody
    | FindingBody
    | LogBody,
    Field(discriminator="type"),
]


class Event(BaseModel):
    """`seq` counts up from 1 without gaps within one `source` ("trainer", "runner")."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    source: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,40}$")]
    seq: int = Field(ge=1, lt=2**31)
    time: float
    body: EventBody


class EventBatch(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    events: list[Event] = Field(max_length=1000)


class EventAck(BaseModel):
    """Highest seq stored for the batch's source."""

    stored: int
