"""What the rooms answer when the server's checks ask them, one JSON document on stdout.

`python -m trainer.cli check-model --spec FILE --json` → ModelFacts
`python -m trainer.cli check-device --spec FILE --json` → DeviceFacts
`python -m trainer.cli check-cluster --spec FILE --json` → ClusterFacts
`python -m sandbox.cli selftest --spec FILE --tasks N --json` → SelfTestFacts
`python -m sandbox.cli harness list --runtimes DIR --json` → list of HarnessRuntime
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

TRAINED_WITH = "lego-rl.json"


class TemplateClass(StrEnum):
    """What a chat template does to turns that were sampled, when the conversation goes on."""

    APPEND_ONLY = "append_only"
    """The next prompt begins with the last prompt and its completion, token for token."""
    STRIPS = "strips"
    """Tokens of earlier turns disappear (thinking)."""
    REWRITES = "rewrites"
    """Earlier turns come back as other tokens."""


class _Facts(BaseModel):
    # The other room may be a little newer.
    model_config = ConfigDict(extra="ignore")


class TrainedWith(_Facts):
    """`lego-rl.json` beside trained weights: what an evaluation must repeat to show the policy what training showed it."""

    renderer: str
    thinking: bool
    history: str
    harnesses: list[str]
    run_id: str
    step: int


class ModelFacts(_Facts):
    """`problem` is empty when everything else could be found out."""

    problem: str = ""
    directory: str = ""
    experts: int = 0
    """0: a dense model."""
    layers: int = 0
    top_k: int = 0
    """Experts per token and layer."""
    longest: int | None = None
    """Longest sequence that the model's configuration allows, in tokens."""
    template: TemplateClass | None = None
    round_trip: str = ""
    """What a golden tool call became on its way through renderer and parser, when it was not itself."""
    junction: list[int] = Field(default_factory=list)
    """Ids that the template puts between a sampled turn's last token and the next user's words; empty when a bridge and a whole render
    disagree about them."""
    prompt_tokens: dict[str, int] = Field(default_factory=dict)
    """Harness → length of its recorded first request, for harnesses that have one."""
    trained_with: TrainedWith | None = None
    """None for weights that no run of ours made."""


class TaskReward(_Facts):
    task: str
    reward: float | None
    detail: str = ""
    """The grader's last word on it."""


class SelfTestFacts(_Facts):
    """Grading sampled tasks with their own solution (`oracle`) and with nothing done (`noop`)."""

    oracle: list[TaskReward] = Field(default_factory=list)
    noop: list[TaskReward] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    limits_mode: str = ""


class HarnessRuntime(_Facts):
    """A pinned harness of this version of the program, and whether the store has it."""

    name: str
    version: str
    installed: bool
    problem: str = ""
    """Missing, or not the bytes that were installed."""


class Trouble(_Facts):
    """Something that keeps a run from going where it is to go."""

    where: str
    """RunSpec field, or part of a cluster."""
    message: str
    fix: str


class DeviceFacts(_Facts):
    """Whether the trainer's environment can train on GPUs."""

    troubles: list[Trouble] = Field(default_factory=list)


class ClusterFacts(_Facts):
    """Whether a cluster would take a run's job."""

    version: str = ""
    """Of Kubernetes; empty when it does not answer."""
    troubles: list[Trouble] = Field(default_factory=list)
