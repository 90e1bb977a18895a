"""The control plane as a regrade sees it: which diffs there are, and what became of the verdicts."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from server.schemas.datadir import DataDir, ServerFile
from server.schemas.regrade import ArchivedTrial, RegradeReport, Verifier

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
        return TypeAdapter(list[ArchivedTrial]).validate_json(self._get(f"/api/runs/{run_id}/archives", {"step": steps}))

    def report(self, run_id: str, verifier: Verifier) -> RegradeReport:
        return RegradeReport.model_validate_json(self._get(f"/api/runs/{run_id}/regrades", {"verifier": verifier}))

    def _get(self, path: str, params: dict[str, Any]) -> bytes:
        try:
            answer = self._http.get(path, params=params)
        except httpx.HTTPError as error:
            raise NoRecord(f"the server at {self.url} does not answer ({error}): run `rl up`") from error
        if answer.is_error:
            raise NoRecord(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        return answer.content
