"""What to look at when a trial has no reward, one line for each cause. Candidates: what the cause was, a person finds out."""

from __future__ import annotations

from .outcome import Cause

HINTS: dict[Cause, str] = {
    Cause.IMAGE: "the task's image is missing, cannot be pulled or cannot be unpacked: pull or build it before the run (`rl image`)",
    Cause.SANDBOX_SETUP: "memory, disk or namespaces of the sandbox host, or the task's tree is gone: see `rl doctor`",
    Cause.AGENT_SETUP: "the harness runtime is missing or damaged: see `rl harness verify`",
    Cause.AGENT_TIMEOUT: "the agent's time budget is short for these tasks, or the engine is slow: see sandbox.budgets.agent_s",
    Cause.HARNESS_NEVER_CALLED: "the harness did not start, or cannot reach its proxy: see its log in the trial's directory",
    Cause.RUNNER_LOST: "the runner or its sandboxes were killed or ran out of memory: see runner.log and `rl doctor`",
    Cause.PROXY: "a bug of the proxy, or a request that it does not understand: see the trial's message and trainer.log",
    Cause.ENGINE: "a prompt longer than the context, or an error of the engine: see the trial's message and the engine's log",
    Cause.VERIFIER: "the task's tests or its tree are broken: see `rl tasks check`, then `rl regrade`, or `rl purge` the task",
    Cause.VERIFIER_TIMEOUT: "the task's tests outlast sandbox.budgets.verifier_s: raise it and `rl regrade`, or `rl purge` the task",
    Cause.CANCELLED: "it was ended on purpose: the run was stopped, or its step was done again",
}
