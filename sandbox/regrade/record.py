"""The control plane as `rl regrade` and `rl purge` see it: which diffs there are, what became of the verdicts, how tasks did."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from server.schemas.datadir import DataDir, ServerFile
from server.schemas.regrade import ArchivedTrial, RegradeReport, Verifier
from server.schemas.tasks_record import TaskRecord

_TIMEOUT_S = 60


class NoRecord(Exception):
    """The control plane cannot be asked; one line that says what to do."""


class Record:
    def __init__(self, data: DataDir) -> None:
        """Raises NoRecord when no server runs on the data directory."""
        try:
            self.url = ServerFile.model_validate_json(data.server_file.read_bytes()).url
            token = data.token.read_text().strip()
        except (OSError, ValidationError):
            raise NoRecord(f"no server is running on {data.root}: run `rl up`") from None
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)

    def archives(self, run_id: str, steps: list[int]) -> list[ArchivedTrial]:
        return TypeAdapter(list[ArchivedTrial]).validate_json(self._get(f"/api/runs/{quote(run_id, safe='')}/archives", {"step": steps}))

    def report(self, run_id: str, verifier: Verifier) -> RegradeReport:
        return RegradeReport.model_validate_json(self._get(f"/api/runs/{quote(run_id, safe='')}/regrades", {"verifier": verifier}))

    def tasks(self, runs: list[str]) -> list[TaskRecord]:
        for run_id in runs:
            self._get(f"/api/runs/{quote(run_id, safe='')}", {})
        return TypeAdapter(list[TaskRecord]).validate_json(self._get("/api/tasks", {"run": runs}))

    def _get(self, path: str, params: dict[str, Any]) -> bytes:
        try:
            answer = self._http.get(path, params=params)
        except httpx.HTTPError as error:
            raise NoRecord(f"the server at {self.url} does not answer ({error}): run `rl up`") from error
        if answer.is_error:
            raise NoRecord(_said(answer) or f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        return answer.content


def _said(answer: httpx.Response) -> str:
    """The server's own words, where it has any."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return ""
    return detail if isinstance(detail, str) and detail != "Not Found" else ""
