"""RunSpec: everything that decides what a run does. Strict: an unknown key is an error with a did-you-mean (`server.spec`).

No behaviour hides in environment variables; a preset is a YAML file in `server/presets/`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .trials import Budgets, Identifier


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Kind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"


class Model(_Section):
    """The policy: a transformers checkpoint directory, or `builtin:NAME` for one that ships in `trainer/policies/`."""

    path: str
    renderer: Literal["qwen3"] = "qwen3"
    thinking: bool = False
    """Whether the chat template opens a thinking block for the policy."""
    context: int = Field(default=256, ge=16)
    """Longest sequence in tokens, prompt and completion together."""


class Harness(_Section):
    """One entry of the weighted list."""

    name: Identifier
    version: str
    weight: float = Field(default=1, gt=0)
    start: Literal["exec", "warm_fork"] = "exec"
    """`warm_fork`: one process per rollout, forked from a parent that has imported the harness."""
    prompt: Literal["full", "bare"] = "full"
    """`bare`: the harness's own mode with a short prompt and few tools, where it has one (Claude Code's `--bare`)."""
    adapter: Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")] = ""
    """`module:Class` of an adapter of your own; empty for a harness that lego-rl knows by name."""


class Data(_Section):
    """Task directories in Harbor's format: a family generated on the machine, or two directories."""

    family: Literal["onebug"] | None = None
    train_tasks: int = Field(default=512, ge=1)
    held_out_tasks: int = Field(default=96, ge=1)
    seed: Seed = 0
    train: Path | None = None
    held_out: Path | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if (self.family is None) == (self.train is None):
            raise ValueError("set exactly one of data.family and data.train")
        return self


class Limits(_Section):
    """Per sandbox. `output_kb` bounds what one command may print."""

    memory_mb: int = Field(default=512, ge=32)
    processes: int = Field(default=128, ge=4)
    cpu_s: int = Field(default=60, ge=1)
    disk_mb: int = Field(default=64, ge=1)
    output_kb: int = Field(default=1024, ge=1)


class Sandbox(_Section):
    environment: Literal["namespace"] = "namespace"
    concurrency: int = Field(default=16, ge=1)
    """Trials that hold a sandbox at the same time."""
    verifier: Literal["separate"] = "separate"
    image: str | None = None
    """What sandboxes are made from where the environment has images and the task's `docker_image` names none."""
    limits: Limits = Limits()
    budgets: Budgets = Budgets()


class Admission(_Section):
    """A gate in front of the engine: a rollout that would push out another one's KV waits. Passing takes a resident prefix, or room."""

    enabled: bool = False
    watermark: float = Field(default=0.85, gt=0, le=1)
    """Share of the KV cache that rollouts under way may own before new ones wait."""
    resident_prefix: float = Field(default=0.8, gt=0, le=1)
    """Share of a prompt that must still be cached for a call to pass in any case."""
    ownership_s: float = Field(default=60, ge=0)
    """How long a rollout owns its KV behind a call."""
    max_wait_s: float = Field(default=120, ge=0)


class Rollout(_Section):
    harness_by: Literal["group", "trajectory"] = "group"
    """What draws a harness from the weighted list: a task's whole group in a step, or each of its rollouts; then those of one (task,
    harness) are compared with each other."""
    engine: Literal["cpu"] = "cpu"
    tasks_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=2)
    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=48, ge=1)
    """Per turn."""
    max_turns: int = Field(default=6, ge=1)
    prompt_budget: int | None = Field(default=None, ge=1)
    """Longest first prompt in tokens; nothing but `model.context` bounds it when empty, nor the next one."""
    response_budget: int | None = Field(default=None, ge=1)
    """Longest rest of a conversation behind its first prompt, sampled and observed tokens together."""
    token_budget: int | None = Field(default=None, ge=1)
    """Sampled tokens of a whole rollout."""
    no_tool_call_cap: int = Field(default=0, ge=0)
    """Turns in a row without a tool call after which a rollout ends; 0 is off."""
    routing: Literal["sticky", "spread"] = "sticky"
    """`sticky`: all calls of a rollout go to one replica, which has its KV; `spread`: each goes to the least busy one."""
    admission: Admission = Admission()


class TrainRule(StrEnum):
    """Which branches of a rollout are trained."""

    ALL_BRANCHES = "all_branches"
    """Everything that the policy sampled and the harness received, in its own context, except auxiliary calls."""
    PARENT_EXACT = "parent_exact"
    """The paper's rule (3.2.2, 4.4): the parent's conversation as far as its history stays exact."""


class History(StrEnum):
    """What becomes of the reasoning of earlier turns when a new user message arrives."""

    KEEP = "keep"
    """It stays: every prompt begins with the ids of the calls before it."""
    STRIP = "strip"
    """It goes, as the deployed chat template would drop it; the next prompt starts a branch."""


class Capture(_Section):
    train: TrainRule = TrainRule.ALL_BRANCHES
    history: History = History.KEEP
    timeout: Literal["fail", "grade"] = "fail"


class Algorithm(_Section):
    """GSPO (paper Eq. 1). `clip_low`/`clip_high` bound the sequence ratio at 1 - low and 1 + high."""

    loss: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0)
    clip_high: float = Field(default=4e-4, gt=0)
    normaliser: Literal["group", "valid"] = "group"
    ratio_base: Literal["behaviour", "recomputed"] = "behaviour"
    routing_replay: bool = True
    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)


class Evaluation(_Section):
    """Held-out evaluation before the first step, every `every` steps (0: never between) and after the last."""

    every: int = Field(default=0, ge=0)
    rollouts: int = Field(default=96, ge=1)
    harness: Identifier | None = None
    """All evaluations run in this one of `harnesses`; by default each task draws its own, the same at every evaluation."""


class Checkpoint(_Section):
    """What a trainer that died goes on from. `every`: steps between checkpoints; 0: the weights after the last step only, and a trainer
    that dies ends the run. The newest `keep` are kept."""

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    restarts: int = Field(default=3, ge=0)
    """How often the trainer is started again before the run fails."""


class Trainer(_Section):
    steps: int = Field(default=12, ge=1, le=1_000_000)
    seed: Seed = 0
    learning_rate: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    device: Literal["cpu"] = "cpu"
    start: Literal["plain", "warm_fork"] = "plain"
    """`warm_fork`: workers are forked from one process that has imported the stack; `plain` is the fallback."""
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()


class Monitors(_Section):
    """Thresholds of the detectors and of the run's own stop rules."""

    stall_s: float = Field(default=300, gt=0)
    """No event for this long: the run is `stalled`."""
    failed_share: float = Field(default=0.5, gt=0, le=1)
    """Share of failed trials in a step above which the run stops."""
    pearson: float = Field(default=0.99, gt=0, le=1)


class Reporting(_Section):
    name: str = ""
    keep_captures: bool = True


class RunSpec(_Section):
    kind: Kind = Kind.TRAIN
    model: Model
    harnesses: Annotated[list[Harness], Field(min_length=1)]
    data: Data
    sandbox: Sandbox = Sandbox()
    rollout: Rollout = Rollout()
    capture: Capture = Capture()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    monitors: Monitors = Monitors()
    reporting: Reporting = Reporting()

    @model_validator(mode="after")
    def _harnesses_by_name(self) -> RunSpec:
        names = [harness.name for harness in self.harnesses]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"harnesses: {twice[0]} is listed twice; give one of them another name, with `adapter`")
        if (pinned := self.trainer.evaluation.harness) is not None and pinned not in names:
            raise ValueError(f"trainer.evaluation.harness: {pinned} is not among harnesses ({', '.join(names)})")
        return self
