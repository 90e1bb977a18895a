"""A trainer as the launcher sees it: real process, real events, no learning. `reporting.name` of the spec says how it goes.

It holds before each step until the file `go` is in the run's directory, unless the name begins with `free`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from server.schemas.events import EvaluationBody, EventBody, GroupBody, OutcomeBody, ResumedBody, RunStateBody, StepBody, TrialBody
from server.schemas.outcome import Scored, Stage, Termination
from server.schemas.rundir import CheckpointFile, RunDir, write_atomic
from server.schemas.spool import Reporter
from server.schemas.states import Phase, RunState, TrialState


def trials(step: int) -> list[EventBody]:
    bodies: list[EventBody] = [GroupBody(group_id=f"g{step}", step=step, phase=Phase.TRAIN, task="t", harness="mini-swe-agent", size=2)]
    for n in range(2):
        trial = f"s{step}-{n}"
        bodies.append(TrialBody(trial_id=trial, state=TrialState.QUEUED, stage=Stage.QUEUED, group_id=f"g{step}", sample=n))
        bodies.append(OutcomeBody(trial_id=trial, outcome=Scored(reward=1 if n else 0, termination=Termination.COMPLETED)))
    return bodies


def resume(run: RunDir, reporter: Reporter) -> int:
    """First step of a later attempt."""
    attempt = int(sys.argv[sys.argv.index("--attempt") + 1])
    latest = CheckpointFile.model_validate_json(run.latest_checkpoint.read_bytes())
    reporter.report(ResumedBody(step=latest.step, attempt=attempt))
    return latest.step + 1


def die_in_step_two(run: RunDir, reporter: Reporter, always: bool) -> None:
    """Behind the checkpoint of step 1: one trial has ended, one is under way, and the step was even reported."""
    run.checkpoints.mkdir(exist_ok=True)
    write_atomic(run.latest_checkpoint, CheckpointFile(step=1, metrics={}).model_dump_json())
    reporter.report(GroupBody(group_id="lost", step=2, phase=Phase.TRAIN, task="t", harness="mini-swe-agent", size=2))
    for n in range(2):
        reporter.report(TrialBody(trial_id=f"lost-{n}", state=TrialState.QUEUED, stage=Stage.QUEUED, group_id="lost", sample=n))
    reporter.report(OutcomeBody(trial_id="lost-0", outcome=Scored(reward=1, termination=Termination.COMPLETED)))
    if not always:
        reporter.report(StepBody(step=2, metrics={"actor/grad_norm": 99}))
    reporter.close(timeout_s=2)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    run = RunDir(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    file = run.load()
    name, steps = file.spec.reporting.name, file.spec.trainer.steps
    while not run.runner_file.exists():
        time.sleep(0.05)
    reporter = Reporter(file.server_url, file.run_id, file.event_token, "trainer", run.spool)
    reporter.report(RunStateBody(state=RunState.RUNNING))
    first = 1
    if "--attempt" in sys.argv:
        first = resume(run, reporter)
    else:
        reporter.report(EvaluationBody(step=0, resolved=1, executed=4, total=4))
    # A stray in a session of its own, as a worker of a worker may be.
    stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (run.root / "stray").write_text(str(stray.pid))
    for step in range(first, steps + 1):
        while not name.startswith("free") and not (run.root / "go").exists():
            time.sleep(0.05)
        if name.endswith("raises") and step == 2:
            print("ERROR nothing yet\nTraceback (most recent call last):\n  File x", flush=True)
            print("ValueError: the loss is \x1b[31mNaN\n\nRuntimeError: worker died", flush=True)
            reporter.close()
            return 3
        if name.endswith("short") and step == 2:
            reporter.close()
            return 0
        if step == 2 and (name.endswith("dies-always") or (name.endswith("dies") and first == 1)):
            die_in_step_two(run, reporter, always=name.endswith("always"))
        for body in trials(step):
            reporter.report(body)
        reporter.report(StepBody(step=step, metrics={"actor/grad_norm": 0.1 * step}))
    reporter.report(EvaluationBody(step=steps, resolved=3, executed=4, total=4))
    reporter.report(RunStateBody(state=RunState.SUCCEEDED))
    reporter.close(timeout_s=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
