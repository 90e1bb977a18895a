"""Entry point of the supervisor: exit code 0 exactly when every expected step was done."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .driver import launch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.launch", description="Train the run that a run directory describes.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory that holds run.json")
    parser.add_argument("--attempt", type=int, default=1, help="from 2 on: go on from the last checkpoint")
    options = parser.parse_args()
    return launch(options.run_dir, options.attempt)


if __name__ == "__main__":
    sys.exit(main())
