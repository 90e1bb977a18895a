"""One run of the trainer in its own processes: start-up, what a step takes beside rollouts and arithmetic, and memory over the steps."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from server.schemas.rundir import RunDir, RunFile, write_atomic
from server.schemas.runspec import Algorithm, Checkpoint, Data, Evaluation, Harness, Model, Rollout, RunSpec, Trainer

from .memory import Memory, growth, look, total
from .surroundings import Surroundings

TASKS = 64


class RunFailed(Exception):
    """The trainer ended without its steps; the message is its last line."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds and MB. `startup_s`: from the start of the process to the end of step 1. A step's overhead is its wall time less waiting for
    rollouts and less the passes through the model; medians from step 2 on. `ours_share` is the time in what verl alone would not do
    (planning an update, its metrics, fidelity) beside the rest of the same step. `memory_mb` is the run's whole memory, shared pages
    counted once; `growth_mb` and `slopes` (MB per step by process, behind the first tenth) are of what a process shares with nobody."""

    schedule: str
    start: str
    steps: int
    startup_s: float
    step_s: float
    rollouts_s: float
    arithmetic_s: float
    overhead_s: float
    ours_share: float
    memory_mb: float
    growth_mb: float
    slopes: dict[str, float]
    load: float
    """Of the machine at the end, without which seconds say little."""

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def line(self) -> str:
        return (
            f"{self.schedule}, {self.start}: start-up to step 1 {self.startup_s:.1f} s  step {self.step_s:.2f} s ="
            f" rollouts {self.rollouts_s:.2f} + arithmetic {self.arithmetic_s:.2f} + overhead {self.overhead_s:.2f} s"
            f"  beside bare verl {self.ours_share:+.1%}"
            f"  memory {self.memory_mb:.0f} MB, {self.growth_mb:+.0f} MB over {self.steps} steps, load {self.load:.1f}\n"
            f"      MB per step: {', '.join(f'{name} {slope:+.2f}' for name, slope in self.slopes.items())}"
        )


def run(steps: int, schedule: Literal["sync", "async"], policy: str, start: Literal["plain", "warm_fork"] = "warm_fork") -> Measured:
    """Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="lego-bench-") as folder:
        around = Surroundings()
        try:
            return _measure(RunDir(Path(folder)), around, _spec(steps, schedule, policy, start))
        finally:
            around.stop()


def _spec(steps: int, schedule: Literal["sync", "async"], policy: str, start: Literal["plain", "warm_fork"]) -> RunSpec:
    """The `local` preset's learning side with small groups."""
    return RunSpec(
        model=Model(path=policy, context=256),
        harnesses=[Harness(name="bench", version="1")],
        data=Data(family="onebug"),
        rollout=Rollout(tasks_per_step=8, group_size=4, max_new_tokens=48, max_turns=6),
        algorithm=Algorithm(clip_low=0.03, clip_high=0.04, ratio_base="recomputed", epochs=2, minibatches=2),
        trainer=Trainer(
            steps=steps,
            schedule=schedule,
            learning_rate=1e-5,
            start=start,
            evaluation=Evaluation(rollouts=1),
            checkpoint=Checkpoint(every=1),
        ),
    )


def _measure(run_dir: RunDir, around: Surroundings, spec: RunSpec) -> Measured:
    for split in ("train", "held_out"):
        folder = run_dir.tasks / split
        folder.mkdir(parents=True)
        lines = [json.dumps({"task": f"{split}-{number}", "kind": "", "instruction": ""}) for number in range(TASKS)]
        (folder / "index.jsonl").write_text("\n".join(lines))
    around.announce(run_dir.runner_file)
    tokens = {"event_token": "bench", "runner_token": "bench"}  # nobody checks them
    file = RunFile(run_id="bench", server_url=around.url, runtimes=run_dir.root, spec=spec, **tokens)
    write_atomic(run_dir.run_file, file.model_dump_json())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.monotonic()
    command = [sys.executable, "-m", "trainer.launch", "--run-dir", str(run_dir.root)]
    trainer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory = _watch(trainer, around, spec.trainer.steps)
    output, _ = trainer.communicate()
    if trainer.returncode or len(around.steps) < spec.trainer.steps:
        raise RunFailed(output.strip().splitlines()[-1] if output.strip() else f"exit code {trainer.returncode}")
    return summary(spec, around.steps, began, memory, os.getloadavg()[0])


def _watch(trainer: subprocess.Popen[str], around: Surroundings, steps: int) -> list[Memory]:
    """After each step but the last, when the run may be ending."""
    memory: list[Memory] = []
    while trainer.poll() is None and len(memory) < steps - 1:
        if len(around.steps) > len(memory):
            memory.append(look(trainer.pid))
        time.sleep(0.05)
    return memory


def summary(
    spec: RunSpec, steps: Sequence[tuple[float, dict[str, float]]], began: float, memory: Sequence[Memory], load: float
) -> Measured:
    """`steps`: when each ended and its metrics; `memory`: after each but the last."""
    walls = [after - before for (before, _), (after, _) in pairwise(steps)]
    parts = [(metrics["timing_s/gen"], metrics["timing_s/arithmetic"]) for _, metrics in steps[1:]]
    overheads = [wall - rollouts - arithmetic for wall, (rollouts, arithmetic) in zip(walls, parts, strict=True)]
    shares = [m["timing_s/ours"] / (wall - m["timing_s/ours"]) for wall, (_, m) in zip(walls, steps[1:], strict=True)]
    grown = growth(memory)
    return Measured(
        schedule=spec.trainer.schedule,
        start=spec.trainer.start,
        steps=len(steps),
        startup_s=steps[0][0] - began,
        step_s=statistics.median(walls),
        rollouts_s=statistics.median(rollouts for rollouts, _ in parts),
        arithmetic_s=statistics.median(arithmetic for _, arithmetic in parts),
        overhead_s=statistics.median(overheads),
        ours_share=statistics.median(shares),
        memory_mb=max(total(at) for at in memory),
        growth_mb=sum(slope for slope in grown.values()) * len(steps),
        slopes=grown,
        load=load,
    )
