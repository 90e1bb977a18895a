"""`python -m trainer.launch.kuberay.layout`: the first container of the head's pod. It makes the run's directory for the ones that follow.

run.json stays in the Secret's memory and is linked to, so the volume never holds a token. The directory may be of an earlier attempt, whose
runner's address must not be taken for the new one's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from server.schemas.rundir import RunDir

from . import SECRET
from .sources import digest


def lay_out(run: RunDir, secret: Path) -> None:
    for directory in (run.root, run.logs, run.spool):
        directory.mkdir(mode=0o700, exist_ok=True)
    run.runner_file.unlink(missing_ok=True)
    run.run_file.unlink(missing_ok=True)
    run.run_file.symlink_to(secret / "run.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.launch.kuberay.layout")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--sources", required=True, help="digest of the source that the image must hold")
    parser.add_argument("--secret", type=Path, default=Path(SECRET))
    options = parser.parse_args()
    if (found := digest()) != options.sources:
        print(f"the image holds lego-rl of source {found}, the server is of {options.sources}: build the image from the server's checkout")
        return 1
    lay_out(RunDir(options.run_dir), options.secret)
    return 0


if __name__ == "__main__":
    sys.exit(main())
