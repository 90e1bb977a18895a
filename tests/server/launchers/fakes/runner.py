"""A runner as the launcher sees it: says where it listens, then waits. It dies at once in a run whose name ends in `no-runner`."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path

from server.schemas.rundir import RunDir, RunnerFile, write_atomic


def main() -> None:
    run = RunDir(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    if run.load().spec.reporting.name.endswith("no-runner"):
        sys.exit("no sandbox here")
    write_atomic(run.runner_file, RunnerFile(url="http://127.0.0.1:1", pid=os.getpid(), boot=uuid.uuid4().hex).model_dump_json())
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
