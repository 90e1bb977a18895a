"""The run's directory: the one place where server, trainer and runner of a run meet on disk.

```
run.json            RunFile: what a process of the run needs to start (mode 0600: it holds tokens)
runner.json         RunnerFile: where the runner listens, written after it does
exit.json           ExitFile: how the supervised processes ended
logs/               one file per process
spool/              events not yet acknowledged by the server
tasks/{split}/      generated Harbor task directories
captures/           CaptureRecord (.json) and token arrays (.npz) per trial
trials/             Harbor's own trial directories
checkpoints/        final weights
```
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from .runspec import RunSpec


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RunFile(_File):
    run_id: str
    server_url: str
    event_token: str
    """Bearer token for `POST /api/runs/{run_id}/events`, minted per run."""
    runner_token: str
    """Bearer token between trainer and runner, minted per run."""
    runtimes: Path
    """The store of pinned harness runtimes."""
    spec: RunSpec


class RunnerFile(_File):
    url: str
    pid: int
    boot: str


class ExitFile(_File):
    """Exit codes by process name (negative: signal), and the last lines of the trainer's log when it failed."""

    trainer: int | None
    runner_restarts: int
    stopped: bool
    tail: list[str]


class RunDir:
    """Paths of one run. Construction does not touch the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_file = root / "run.json"
        self.runner_file = root / "runner.json"
        self.exit_file = root / "exit.json"
        self.logs = root / "logs"
        self.spool = root / "spool"
        self.tasks = root / "tasks"
        self.captures = root / "captures"
        self.trials = root / "trials"
        self.checkpoints = root / "checkpoints"

    def load(self) -> RunFile:
        """The run file; raises FileNotFoundError when the directory is no run's."""
        return RunFile.model_validate_json(self.run_file.read_bytes())


def write_atomic(path: Path, text: str, mode: int = 0o600) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        Path(name).replace(path)
    except BaseException:  # the temporary file must not survive any failure, also not a KeyboardInterrupt
        Path(name).unlink()
        raise
