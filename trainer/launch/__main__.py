"""Entry point of the supervisor: exit code 0 exactly when every expected step was done."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from server.schemas.rundir import RunDir

from . import ray_job
from .driver import launch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.launch", description="Train the run that a run directory describes.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory that holds run.json")
    parser.add_argument("--attempt", type=int, default=1, help="from 2 on: go on from the last checkpoint")
    parser.add_argument("--in-job", action="store_true", help="this is the job that `trainer.launcher` ray or kubernetes submitted")
    options = parser.parse_args()
    run = RunDir(options.run_dir.resolve())
    if not options.in_job and run.run_file.exists():
        file = run.load()
        match file.spec.trainer.launcher:
            case "ray":
                return ray_job.submit(run, file, options.attempt)
            case "kubernetes":
                from .kuberay.job import submit  # late: the client's import takes a second

                return submit(run, file, options.attempt)
    return launch(options.run_dir, options.attempt)


if __name__ == "__main__":
    sys.exit(main())
