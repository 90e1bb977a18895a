"""`quick_trainer.py --run-dir DIR`: learns nothing, takes a second, and reports what a real trainer would."""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path

from server.schemas.events import EvaluationBody, GroupBody, OutcomeBody, RunStateBody, StepBody, TrialBody
from server.schemas.outcome import Scored, Stage, Termination
from server.schemas.rundir import RunDir, RunFile
from server.schemas.spool import Reporter
from server.schemas.states import Phase, RunState, TrialState


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = RunDir(parser.parse_args().run_dir)
    run = run_dir.load()
    reporter = Reporter(run.server_url, run.run_id, run.event_token, "trainer", run_dir.spool)
    reporter.report(RunStateBody(state=RunState.RUNNING))
    _train(run, reporter)
    reporter.close()


def _train(run: RunFile, reporter: Reporter) -> None:
    """Solves a quarter of the held-out tasks before training and three quarters after."""
    spec, harness, ids = run.spec, run.spec.harnesses[0].name, count(1)

    def group(step: int, phase: Phase, size: int, solved: int) -> None:
        name = f"g{next(ids)}"
        reporter.report(GroupBody(group_id=name, step=step, phase=phase, task=f"task-{name}", harness=harness, size=size))
        for sample in range(size):
            trial = f"{name}-{sample}"
            for state, stage in ((TrialState.RUNNING, Stage.AGENT), (TrialState.SCORED, Stage.DONE)):
                reporter.report(TrialBody(trial_id=trial, state=state, stage=stage, group_id=name, sample=sample))
            outcome = Scored(reward=1 if sample < solved else 0, termination=Termination.COMPLETED)
            reporter.report(OutcomeBody(trial_id=trial, outcome=outcome))

    def evaluate(step: int, solved: int) -> None:
        total = spec.trainer.evaluation.rollouts
        group(step, Phase.EVAL, total, solved)
        reporter.report(EvaluationBody(step=step, resolved=solved, executed=total, total=total))

    evaluate(0, spec.trainer.evaluation.rollouts // 4)
    for step in range(1, spec.trainer.steps + 1):
        for _ in range(spec.rollout.tasks_per_step):
            group(step, Phase.TRAIN, spec.rollout.group_size, spec.rollout.group_size // 2)
        metrics = {
            "training/rollout_actor_probs_pearson_corr": 0.9995,
            "lego/sampled_tokens": 100.0,
            "lego/trained_tokens": 90.0,
            "lego/excluded_tokens/zero_advantage": 10.0,
        }
        reporter.report(StepBody(step=step, metrics=metrics))
    evaluate(spec.trainer.steps, spec.trainer.evaluation.rollouts * 3 // 4)


if __name__ == "__main__":
    main()
