"""The run's directory: the one place where server, trainer and runner of a run meet on disk.

```
run.json            RunFile: what a process of the run needs to start (mode 0600: it holds tokens)
runner.json         RunnerFile: where the runner listens, written after it does
proxy.json          ProxyFile: where the trainer serves the proxy's metrics
launch.json         what the supervisor starts (server.launchers.supervisor)
processes.jsonl     ownership ledger: one line per process that was started (server.launchers.identity)
exit.json           ExitFile: how the supervised processes ended
logs/               one file per process
spool/              events not yet acknowledged by the server
tasks/{split}/      generated Harbor task directories
captures/           CaptureRecord (.json) and capture file (.npz, server.schemas.capturefile) per trial
trials/             Harbor's own trial directories
checkpoints/        global_step_N of verl, latest.json (CheckpointFile), best.json (BestFile), final: the weights after the last step
```
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

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


class ProxyFile(_File):
    """`metrics`: base URL of `GET /metrics`, which takes the run's runner token."""

    metrics: str


class ExitFile(_File):
    """How the run's processes ended. `trainer` is its exit code (negative: signal), `tail` the end of its log when it failed."""

    trainer: int | None
    runner_restarts: int
    trainer_restarts: int = 0
    stopped: bool
    tail: list[str]
    reason: str = ""
    """Why the supervisor ended the trainer, when it did without being asked to."""


class TaskMemory(_File):
    """What policy-relative sampling knows of a task: solved and scored rollouts and groups, earlier ones counting less, and the step it
    was drawn for last."""

    solved: float = 0.0
    scored: float = 0.0
    groups: float = 0.0
    drawn: int = 0


class CheckpointFile(_File):
    """Written when everything of the checkpoint after `step` updates is on disk, so it always names a whole one; 0 stands for the
    policy that the run began with. `metrics` are those of the step, should its event be lost. `unfinished`: tasks that were begun and not
    trained, which the next start plays first."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    step: int
    metrics: dict[str, float]
    unfinished: list[str] = []
    pool: dict[str, TaskMemory] = {}
    draws: int = 0
    """How often policy-relative sampling drew tasks."""
    spec: dict[str, Any] = {}
    """The learning side of the run's specification as it was then: a later start says what was changed."""


class BestFile(_File):
    """`best.json`: the checkpoint whose held-out evaluation resolved the largest share of all its trials."""

    step: int
    resolved: int
    total: int


class RunDir:
    """Paths of one run. Construction does not touch the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_file = root / "run.json"
        self.runner_file = root / "runner.json"
        self.proxy_file = root / "proxy.json"
        self.launch_file = root / "launch.json"
        self.processes_file = root / "processes.jsonl"
        self.exit_file = root / "exit.json"
        self.logs = root / "logs"
        self.spool = root / "spool"
        self.tasks = root / "tasks"
        self.captures = root / "captures"
        self.trials = root / "trials"
        self.checkpoints = root / "checkpoints"
        self.latest_checkpoint = self.checkpoints / "latest.json"
        self.best_checkpoint = self.checkpoints / "best.json"

    def load(self) -> RunFile:
        """The run file; raises FileNotFoundError when the directory is no run's."""
        return RunFile.model_validate_json(self.run_file.read_bytes())


def write_atomic(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part. Raises OSError, and then leaves nothing behind."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).replace(path)
    except BaseException:  # the temporary file must not survive any failure, also not a KeyboardInterrupt
        Path(name).unlink()
        raise
