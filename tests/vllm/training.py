"""Three steps through the launcher, with real verl, Ray and vLLM: a fake runner plays the harness, and what the run reports is judged."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from server.schemas.events import RunStateBody, StepBody
from server.schemas.rundir import RunDir
from server.schemas.runspec import Algorithm, Evaluation, Reporting, Rollout, Trainer
from tests.trainer.support.fake_runner import FakeRunner
from tests.trainer.support.fake_server import FakeServer
from tests.trainer.support.main_ppo import SIZE, TASKS, World, left_behind, of, prepare, start
from tests.trainer.support.plays import two_turns
from tests.trainer.support.tiny_policy import save_policy

STEPS = 3
PEARSON = {"cpu": 0.999, "cuda": 0.99}
DIFFERENCE = {"cpu": 1e-4, "cuda": 0.1}
"""Nats between engine and trainer, on average: both in fp32 on a CPU, both in bf16 on a GPU."""


def three_steps(
    home: Path, kind: Literal["dense", "experts"], device: Literal["cpu", "cuda"], limit_s: float
) -> Iterator[tuple[bool, str]]:
    """(whether it held, what was looked at), one after the other. Engine and trainer share the device, in turns."""
    server, run, dense = FakeServer("events"), RunDir(home / "run"), kind == "dense"
    run.root.mkdir(parents=True)
    runner = FakeRunner(run.runner_file, "trials", two_turns)
    runner.start()
    try:
        save_policy(home / "policy", dense=dense, tied=False, head_dim=64)
        world = World(run, server, runner)
        prepare(
            world,
            home / "policy",
            rollout=Rollout(tasks_per_step=TASKS, group_size=SIZE, max_new_tokens=8, max_turns=4, engine="vllm", gpu_memory=0.3),
            algorithm=Algorithm(clip_low=0.03, clip_high=0.04, minibatches=2, routing_replay=not dense),
            trainer=Trainer(device=device, attention="sdpa", steps=STEPS, learning_rate=1e-3, evaluation=Evaluation(rollouts=4)),
            reporting=Reporting(),
        )
        launched = start(world)
        try:
            output, _ = launched.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            launched.terminate()
            launched.communicate(timeout=60)
            yield False, f"{kind} run: not done after {limit_s:.0f} s; {_tail(run)}"
            return
        ended = f"{kind} run: {(output.strip().splitlines() or ['no word'])[-1]}"
        yield launched.returncode == 0, ended if launched.returncode == 0 else f"{ended}; {_tail(run)}"
        yield from judged(kind, device, of(server.bodies(), StepBody))
        failed = [state.reason for state in of(server.bodies(), RunStateBody) if state.reason]
        left = left_behind(world)
        yield not failed and not left, f"{kind} run: nothing failed and nothing was left behind {failed or left or ''}".rstrip()
    finally:
        runner.stop()
        server.stop()


def judged(kind: str, device: str, steps: list[StepBody]) -> Iterator[tuple[bool, str]]:
    yield [step.step for step in steps] == list(range(1, STEPS + 1)), f"{kind} run: {len(steps)} steps"
    for step in steps:
        metrics = step.metrics
        pearson, difference = metrics["training/rollout_actor_probs_pearson_corr"], metrics["lego/fidelity/mean_abs"]
        tokens, updates = metrics["lego/trained_tokens"], metrics["lego/optimizer_steps"]
        held = pearson >= PEARSON[device] and difference < DIFFERENCE[device] and tokens > 0 and updates == 2
        what = f"{tokens:.0f} tokens, {updates:.0f} updates, Pearson {pearson:.7f}, mean |Δ log p| {difference:.1e}"
        if kind == "experts":
            replayed, missing = metrics["lego/routing/replayed"], metrics["lego/routing/missing"]
            held, what = held and replayed > 0 == missing, f"{what}, {replayed:.0f} routes replayed, {missing:.0f} missing"
        yield held, f"{kind} run, step {step.step}: {what}"


def _tail(run: RunDir) -> str:
    log = run.logs / "verl.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "end of verl.log:\n" + "\n".join(lines[-30:])
