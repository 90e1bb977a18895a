from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.launchers.identity import OwnedProcess, is_alive, kill_marked
from server.schemas.api import RunStatus
from server.schemas.datadir import DataDir, ServerFile
from server.schemas.rundir import RunDir
from server.schemas.states import TERMINAL_RUN_STATES

from ..waiting import until

SCRIPT = Path(__file__).with_name("serve.py")


class Server:
    """A real server process on a data directory. `kill` is kill -9."""

    def __init__(self, root: Path, database_url: str = "") -> None:
        self.data = DataDir(root)
        self._database_url = database_url
        self.process: subprocess.Popen[bytes] | None = None

    def up(self, port: int = 0) -> None:
        self.process = subprocess.Popen([sys.executable, "-P", str(SCRIPT), str(self.data.root), self._database_url, str(port)])
        until(lambda: self.data.server_file.exists() and self._file().pid == self.process.pid)  # type: ignore[union-attr]
        token = self.data.token.read_text().strip()
        self.http = httpx.Client(base_url=self._file().url, headers={"authorization": f"Bearer {token}"}, timeout=60, trust_env=False)

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()

    def down(self) -> None:
        assert self.process
        self.process.terminate()
        self.process.wait(60)

    def clean_up(self) -> None:
        """What the runs of a failed test left."""
        for run in self.data.runs.iterdir():
            kill_marked(run.name)

    def start_run(self, name: str, steps: int = 3, **overrides: Any) -> str:
        request = {"document": {"extends": "local"}, "overrides": {"reporting.name": name, "trainer.steps": steps} | overrides}
        plan = self.http.post("/api/plans", json=request)
        answer = self.http.post("/api/runs", json={"digest": plan.json()["digest"]})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run_id"])

    def status(self, run_id: str) -> RunStatus:
        return RunStatus.model_validate_json(self.http.get(f"/api/runs/{run_id}").content)

    def end_of(self, run_id: str) -> RunStatus:
        def ended() -> RunStatus | None:
            status = RunStatus.model_validate_json(self.http.get(f"/api/runs/{run_id}", params={"wait": 5}).content)
            return status if status.state in TERMINAL_RUN_STATES else None

        return until(ended)  # type: ignore[no-any-return]

    def dir(self, run_id: str) -> RunDir:
        return RunDir(self.data.runs / run_id)

    def processes(self, run_id: str, role: str = "") -> list[OwnedProcess]:
        """The living processes of a run, as its ledger file says."""
        lines = self.dir(run_id).processes_file.read_text().splitlines()
        known = {process.pid: process for process in map(OwnedProcess.model_validate_json, lines)}
        return [process for process in known.values() if is_alive(process) and process.role.startswith(role)]

    def _file(self) -> ServerFile:
        return ServerFile.model_validate_json(self.data.server_file.read_bytes())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("data"))
    server.up()
    yield server
    server.down()
    server.clean_up()


@pytest.fixture
def own_server(tmp_path: Path, database_url: str) -> Iterator[Server]:
    """A server for one test that kills it, on SQLite and on PostgreSQL."""
    server = Server(tmp_path / "data", database_url)
    server.up()
    yield server
    server.kill()
    server.clean_up()
