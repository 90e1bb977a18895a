"""Programs of the running cluster, for tests that take them away for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_ENDS_S = 30


class Part:
    """One program, as `node.Node` started it. `state` is the cluster's directory, which holds its kubeconfig."""

    def __init__(self, state: Path, name: str) -> None:
        self._state, self._name = state, name
        record = json.loads((state / f"{name}.part").read_text())
        self.argv: list[str] = record["argv"]
        self._env: dict[str, str] = record["env"]
        self._pid: int = record["pid"]

    def kill(self) -> None:
        """Return when it runs no more."""
        os.kill(self._pid, signal.SIGKILL)
        end = time.monotonic() + _ENDS_S
        while self._runs():
            assert time.monotonic() < end, f"{self._name} does not end"
            time.sleep(0.02)

    def _runs(self) -> bool:
        """A zombie, whose parent does not ask for it, does not."""
        try:
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def start(self, argv: list[str] | None = None) -> None:
        """Start it again, once with other arguments where some are given."""
        with (self._state / f"{self._name}.log").open("ab") as log:
            started = subprocess.Popen(
                argv or self.argv, cwd=self._state, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._pid = started.pid
        record(self._state, self._name, self.argv, self._env, started.pid)


def record(state: Path, name: str, argv: list[str], env: Mapping[str, str], pid: int) -> None:
    (state / f"{name}.part").write_text(json.dumps({"argv": argv, "env": dict(env), "pid": pid}))
