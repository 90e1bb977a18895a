"""RunSpec: everything that decides what a run does. Strict: an unknown key is an error with a did-you-mean (`server.spec`).

No behaviour hides in environment variables; a preset is a YAML file in `server/presets/`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .kuberay import KubeRay
from .kubernetes import Kubernetes
from .trials import Budgets, Identifier


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Kind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"


Family = Literal["qwen3", "qwen3.5"]
"""Of chat formats: how messages become tokens and sampled tokens become messages."""


class Model(_Section):
    """The policy: a transformers checkpoint directory, or `builtin:NAME` for one that ships in `trainer/policies/`."""

    path: str
    renderer: Family = "qwen3"
    thinking: bool = False
    """Whether the chat template opens a thinking block for the policy."""
    context: int = Field(default=200_000, ge=16)
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


class Relative(_Section):
    """Policy-relative sampling of the training tasks: draw what the present policy sometimes solves."""

    memory: float = Field(default=0.75, ge=0, lt=1)
    """How much of what is known of a task still counts when a new group of it arrives."""
    retire_below: float = Field(default=0.4, ge=0, lt=1)
    """Chance of a group with both rewards below which a task is retired."""
    revisit_steps: int = Field(default=20, ge=1)
    """Steps after which a retired task is looked at again."""


class Data(_Section):
    """Task directories in Harbor's format: a family generated on the machine, or two directories."""

    family: Literal["onebug"] | None = None
    train_tasks: int = Field(default=512, ge=1)
    held_out_tasks: int = Field(default=96, ge=1)
    seed: Seed = 0
    train: Path | None = None
    held_out: Path | None = None
    sampling: Literal["static", "relative"] = "static"
    """`static`: every task once per epoch, in an order drawn by seed. `relative`: by what the policy can learn from."""
    relative: Relative = Relative()

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
    scratch: Literal["memory", "disk"] = "memory"
    """Where a `namespace` sandbox keeps what it writes: in memory, which counts against `memory_mb`, or in a file system of `disk_mb` on
    disk (root, loop devices and mkfs.ext4 needed)."""
    output_kb: int = Field(default=1024, ge=1)


class Images(_Section):
    """Where the images of sandboxes come from and how much of them is kept on this machine."""

    build: bool = False
    """Build the Dockerfile of a task that names no image; otherwise such a task uses `sandbox.image`, or this machine's programs."""
    cache: Path | None = None
    """Directory of unpacked images; by default `images` in the user's data directory."""
    cache_gb: float = Field(default=50, gt=0)
    """The images used longest ago are removed until the rest is no larger."""
    pulls: int = Field(default=2, ge=1)
    """Images fetched or built at the same time before a run."""
    pull_pause_s: float = Field(default=0, ge=0)
    """Before each further image: registries count requests."""
    index_mirror: Annotated[str, Field(pattern=r"^(https?://[\w.-]+(:\d+)?(/[\w./-]*)?)?$")] = ""
    """The one Python package index that a Dockerfile's steps may reach; without it they have no network."""


class Docker(_Section):
    """The engine that makes the containers, on this machine or another one (docs/docker.md)."""

    url: Annotated[str, Field(pattern=r"^(unix:///|tcp://[^/]+:\d+$|ssh://[^/]+)")] = "unix:///var/run/docker.sock"
    tls: Path | None = None
    """Directory with `ca.pem`, `cert.pem` and `key.pem`, which `tcp://` needs: whoever reaches an engine is root on its machine."""
    mounts: Literal["bind", "copy"] | None = None
    """How a harness's runtime gets into a container: bound from this machine (the default for `unix://`), or copied into an image."""

    @model_validator(mode="after")
    def _protected(self) -> Docker:
        if self.url.startswith("tcp://") and self.tls is None:
            raise ValueError("set tls: an engine at tcp:// without it makes everyone who reaches the port root on its machine")
        return self


class Sandbox(_Section):
    environment: Literal["namespace", "docker", "kubernetes"] = "namespace"
    concurrency: int = Field(default=16, ge=1)
    """Trials that hold a sandbox at the same time."""
    verifier: Literal["separate"] = "separate"
    image: str | None = None
    """What sandboxes are made from where the environment has images and the task's `docker_image` names none."""
    images: Images = Images()
    docker: Docker = Docker()
    kubernetes: Kubernetes = Kubernetes()
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
    engine: Literal["cpu", "vllm"] = "cpu"
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that hold one copy of the policy for generation."""
    gpu_memory: float = Field(default=0.85, gt=0, lt=1)
    """Share of a GPU's memory that the engine takes while it generates."""
    tasks_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=2)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 is off. The trainer's log-probabilities are those of the whole distribution, so a cut one goes with no objective."""
    max_new_tokens: int = Field(default=32_768, ge=1)
    """Per turn."""
    max_turns: int = Field(default=200, ge=1)
    prompt_budget: int | None = Field(default=30_000, ge=1)
    """Longest prompt in tokens of the call that opens a rollout; later ones, and this one when null, are bounded by `model.context`."""
    response_budget: int | None = Field(default=170_000, ge=1)
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
    """The clipped surrogate (paper Eq. 1). `clip_low`/`clip_high` bound the ratio at 1 - low and 1 + high."""

    loss: Literal["gspo", "grpo", "ppo"] = "gspo"
    """`gspo`: one ratio per rollout. `grpo`: one per token, every rollout weighs the same. `ppo`: one per token, every token weighs the
    same. The advantage is the group's in all three."""
    clip_low: float = Field(default=3e-4, gt=0)
    clip_high: float = Field(default=4e-4, gt=0)
    normaliser: Literal["group", "valid"] = "group"
    """What a group's sum is divided by: its size (Eq. 1), or its scored members. `ppo` divides by tokens, which a failed one has not."""
    ratio_base: Literal["behaviour", "recomputed"] = "behaviour"
    """The denominator of the ratio: the captured log-probabilities (Eq. 1), or the trainer's own at the step's start."""
    kl: float = Field(default=0.0, ge=0)
    """Coefficient of the low-variance KL to the first weights, in the loss only (paper: 1e-3)."""
    importance_sampling: Literal["off", "token"] = "off"
    """`token`: each token's loss is weighed by trainer / engine probability at the step's start, at most `importance_cap`."""
    importance_cap: float = Field(default=2.0, gt=1)
    routing_replay: bool = True
    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _corrected_once(self) -> Algorithm:
        if self.importance_sampling != "off" and self.ratio_base == "behaviour":
            raise ValueError(
                "importance_sampling: the ratio to the behaviour policy holds this correction already; set ratio_base: recomputed, or off"
            )
        return self


class Evaluation(_Section):
    """Held-out evaluation before the first step, every `every` steps (0: never between) and after the last."""

    every: int = Field(default=0, ge=0)
    rollouts: int = Field(default=96, ge=1)
    harness: Identifier | None = None
    """All evaluations run in this one of `harnesses`; by default each task draws its own, the same at every evaluation."""
    temperature: float | None = Field(default=None, gt=0)
    """That of training by default."""


class Checkpoint(_Section):
    """What a trainer that died goes on from. `every`: steps between checkpoints; 0: the weights after the last step only, and a trainer
    that dies ends the run. The newest `keep` are kept."""

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    restarts: int = Field(default=3, ge=0)
    """How often the trainer is started again before the run fails."""


class Parallel(_Section):
    """Over how many GPUs training splits one copy of the policy, per kind. FSDP2 and VeOmni split sequences by Ulysses."""

    sequence: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)

    @property
    def ways(self) -> int:
        """GPUs over which one copy of the policy is split; experts are shared out among copies."""
        return self.sequence * self.tensor * self.context * self.pipeline

    def beyond(self, *kinds: str) -> list[str]:
        """The kinds that are asked for and not among `kinds`."""
        return [name for name, value in self if value > 1 and name not in kinds]


class Cluster(_Section):
    """The machines of the learning side."""

    nodes: int = Field(default=1, ge=1)
    """Nodes that train; without `rollout_nodes` they generate too."""
    rollout_nodes: int = Field(default=0, ge=0)
    """Nodes that only generate."""
    gpus_per_node: int = Field(default=1, ge=1)
    """On a CPU: training processes, each with its share of the weights and of every batch."""
    ray: Annotated[str, Field(pattern=r"^(local|auto|[\w.-]+:\d+)$")] = "local"
    """`local`: a Ray cluster of the run's own, on one node; `auto` or `HOST:PORT`: one that exists and stays."""
    jobs: str = "http://127.0.0.1:8265"
    """Ray's Jobs API, for `trainer.launcher: ray`."""
    kubernetes: KubeRay | None = None
    """For `trainer.launcher: kubernetes`."""

    @property
    def one_machine(self) -> bool:
        """Whether one node trains and generates."""
        return (self.nodes, self.rollout_nodes) == (1, 0)

    @model_validator(mode="after")
    def _nodes_are_joined(self) -> Cluster:
        if self.ray == "local" and self.nodes + self.rollout_nodes > 1:
            raise ValueError("a Ray cluster of the run's own has one node: set ray to auto or HOST:PORT, or nodes: 1 and rollout_nodes: 0")
        return self


class Trainer(_Section):
    steps: int = Field(default=12, ge=1, le=1_000_000)
    seed: Seed = 0
    learning_rate: float = Field(default=1e-6, ge=0)
    """At 0 the weights stay as they are: what trainer and engine then disagree about comes from the engine."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    schedule: Literal["sync", "async"] = "sync"
    """`async`: rollouts go on while the trainer trains, under weights that are at most `staleness` updates behind."""
    staleness: int = Field(default=1, ge=1)
    """Largest lag of a trained rollout, counted from its first sampled token; one that would lag more is dropped and counted."""
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["fsdp2", "veomni", "megatron"] = "fsdp2"
    parallel: Parallel = Parallel()
    attention: Literal["flash", "sdpa"] = "flash"
    """What attends on GPUs. `flash`: the package flash-attn, which can split sequences. `sdpa`: PyTorch's own, with backend fsdp2; it takes
    memory for the square of a micro-batch's tokens. A CPU has PyTorch's own."""
    offload: bool = False
    """Parameters and optimizer state lie in host memory between passes."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Sequences per forward pass of one GPU; by default as many as make a batch of tokens."""
    cluster: Cluster = Cluster()
    launcher: Literal["process", "ray", "kubernetes"] = "process"
    """`ray`: the trainer is a job of the Ray cluster behind `cluster.jobs`; the run's directory lies at the same path there.
    `kubernetes`: trainer and runner are a KubeRay RayJob with a Ray cluster of its own."""
    start: Literal["plain", "warm_fork"] = "plain"
    """`warm_fork`: workers are forked from one process that has imported the stack; `plain` is the fallback."""
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()

    @property
    def copies(self) -> int:
        """Copies of the policy that train side by side, each on its part of a batch."""
        return self.cluster.nodes * self.cluster.gpus_per_node // self.parallel.ways


class Monitors(_Section):
    """Thresholds of the detectors and of the run's own stop rules."""

    stall_s: float = Field(default=300, gt=0)
    """No event for this long: the run is `stalled`."""
    failed_share: float = Field(default=0.5, gt=0, le=1)
    """Share of failed trials in a step above which the run stops."""
    pearson: float = Field(default=0.99, gt=0, le=1)
    lagged_fidelity: bool = True
    """Compare tokens of older weights with those weights too: a copy of them per version, and a forward pass of the rows concerned."""


class Reporting(_Section):
    name: str = ""
    keep_captures: bool = True
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Experiment trackers that get every step's metrics too, through verl's own loggers; each is configured as it always is."""


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
    def _one_machine_or_many(self) -> RunSpec:
        trainer, engine = self.trainer, self.rollout.engine
        if trainer.device == "cuda" and engine == "cpu":
            raise ValueError("rollout.engine cpu does not go with trainer.device cuda: use vllm")
        ranks = trainer.cluster.gpus_per_node
        if trainer.device == "cpu" and engine == "vllm" and (trainer.start != "plain" or self.rollout.tensor_parallel > 1 or ranks > 1):
            raise ValueError(
                "rollout.engine vllm on a CPU starts processes of its own on one device: use start: plain, tensor_parallel: 1 and"
                " gpus_per_node: 1"
            )
        if trainer.device == "cpu" and (trainer.backend != "fsdp2" or not trainer.cluster.one_machine or trainer.parallel != Parallel()):
            raise ValueError(
                "trainer.device cpu trains on one machine with backend fsdp2, and without flash attention no sequence can be split:"
                " leave backend, nodes and parallel out, or use cuda"
            )
        if trainer.device == "cuda" and (trainer.schedule == "async") != (trainer.cluster.rollout_nodes > 0):
            raise ValueError(
                "trainer.schedule async generates on nodes of its own and sync does not: set trainer.cluster.rollout_nodes above 0 or to 0"
            )
        able = {"fsdp2": ("sequence",), "veomni": ("sequence", "expert"), "megatron": ("tensor", "expert", "context", "pipeline")}
        if beyond := trainer.parallel.beyond(*able[trainer.backend]):
            raise ValueError(f"trainer.parallel.{beyond[0]}: {trainer.backend} splits by {', '.join(able[trainer.backend])} only")
        if trainer.launcher == "ray" and (trainer.cluster.ray == "local" or trainer.start != "plain"):
            raise ValueError("trainer.launcher ray: the job uses its own cluster and plain workers: set cluster.ray: auto and start: plain")
        if trainer.launcher == "kubernetes":
            self._in_pods()
        gpus = trainer.cluster.nodes * trainer.cluster.gpus_per_node
        ways = trainer.parallel.ways
        if gpus % ways:
            raise ValueError(f"trainer.parallel splits the policy over {ways} GPUs, which does not divide the {gpus} of trainer.cluster")
        if trainer.device == "cuda":
            self._on_gpus()
        return self

    def _on_gpus(self) -> None:
        trainer, cluster, size = self.trainer, self.trainer.cluster, self.rollout.tensor_parallel
        if trainer.start != "plain":
            raise ValueError("trainer.start warm_fork forks processes, which CUDA does not survive: use start: plain with device cuda")
        if trainer.attention == "sdpa" and (trainer.backend != "fsdp2" or trainer.parallel.sequence > 1):
            raise ValueError("trainer.attention sdpa goes with backend fsdp2 and whole sequences: set parallel.sequence: 1, or use flash")
        each, nodes = cluster.gpus_per_node, cluster.rollout_nodes or cluster.nodes
        if each % size and (size % each or nodes % (size // each)):
            raise ValueError(f"rollout.tensor_parallel {size}: {nodes} nodes of {each} GPUs cannot be shared out among copies of that size")

    def _in_pods(self) -> None:
        if self.trainer.cluster.kubernetes is None:
            raise ValueError("trainer.launcher kubernetes: say which cluster and image: set trainer.cluster.kubernetes")
        if self.trainer.cluster.ray != "auto" or self.trainer.start != "plain":
            raise ValueError(
                "trainer.launcher kubernetes: the job has its own cluster and plain workers: set cluster.ray: auto, start: plain"
            )
        if self.sandbox.environment != "kubernetes":
            raise ValueError("trainer.launcher kubernetes: the runner sits in a pod too: set sandbox.environment: kubernetes")

    @model_validator(mode="after")
    def _harnesses_by_name(self) -> RunSpec:
        names = [harness.name for harness in self.harnesses]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"harnesses: {twice[0]} is listed twice; give one of them another name, with `adapter`")
        if (pinned := self.trainer.evaluation.harness) is not None and pinned not in names:
            raise ValueError(f"trainer.evaluation.harness: {pinned} is not among harnesses ({', '.join(names)})")
        return self
