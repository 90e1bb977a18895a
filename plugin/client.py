"""The one typed client of the control plane: every verb of the CLI and every MCP tool goes through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from server.schemas.api import (
    CheckJob,
    CheckRequest,
    DiagnoseRequest,
    ReviewRequest,
    RunStatus,
    RunSummary,
    ServerInfo,
    SpecRequest,
    StartRequest,
    StepRow,
    TrialDetail,
    TrialRow,
)
from server.schemas.capture import CaptureRecord, TurnTokens
from server.schemas.checks import CheckReport, Diagnosis, Finding, Plan, ResolvedSpec, Verdict
from server.schemas.datadir import DataDir, ServerFile

from .errors import ControlError, NoAnswer, ServerAbsent

T = TypeVar("T")

TIMEOUT_S = 9.8
"""A tool must answer in 10 s, so no request may take longer; a long poll asks for less."""

WAIT_S = 8.0


def find_server(data: DataDir) -> ServerFile:
    """Where the server of a data directory says it listens. Raises ServerAbsent; whether it still does, only a request tells."""
    try:
        server = ServerFile.model_validate_json(data.server_file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ServerAbsent(f"no server is running on {data.root}: run `rl up`") from None
    except (OSError, ValidationError):
        raise ControlError(f"cannot read {data.server_file}: run `rl up` again, or name the server with --url") from None
    if not Path(f"/proc/{server.pid}").exists():  # killed: its port, and with it the token, may be someone else's by now
        raise ServerAbsent(f"no server is running on {data.root}: run `rl up`")
    return server


def read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        raise ServerAbsent(f"no token at {path}: the server writes it when it first starts; run `rl up` or give --token-file") from None
    except OSError as error:
        raise ControlError(f"cannot read the token {path}: {error.strerror}; run as the user who owns it or give --token-file") from None
    except UnicodeDecodeError:
        token = ""
    if not token.isascii() or not token.isprintable() or not token:
        raise ControlError(f"{path} holds no token: `rl down` and `rl up` make a new one, or give --token-file")
    return token


class Client:
    """Synchronous. Every method raises ControlError with one line for the person, and nothing else."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {token}"}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        except httpx.InvalidURL as error:
            raise ControlError(f"{url} is no address of a server: {error}") from None

    @classmethod
    def of(cls, data: DataDir, url: str | None = None, token_file: Path | None = None) -> Client:
        """The server at `url`, else the one that runs on the data directory."""
        return cls(url or find_server(data).url, read_token(token_file or data.token))

    def close(self) -> None:
        self._http.close()

    def info(self) -> ServerInfo:
        return self._call("GET", "/api/info", ServerInfo)

    def check(self, request: CheckRequest) -> CheckJob:
        return self._call("POST", "/api/checks", CheckJob, request)

    def check_status(self, check_id: str, wait_s: float = 0) -> CheckJob:
        return self._call("GET", f"/api/checks/{_segment(check_id)}", CheckJob, params={"wait": wait_s} if wait_s else None)

    def report(self, request: CheckRequest) -> CheckReport:
        """The report of a check, however long it takes."""
        job = self.check(request)
        while job.report is None:
            job = self.check_status(job.check_id, wait_s=WAIT_S)
        return job.report

    def resolve(self, request: SpecRequest) -> ResolvedSpec:
        return self._call("POST", "/api/specs", ResolvedSpec, request)

    def plan(self, request: SpecRequest) -> Plan:
        return self._call("POST", "/api/plans", Plan, request)

    def planned(self, digest: str) -> Plan:
        """A plan that was made before."""
        return self._call("GET", f"/api/plans/{_segment(digest)}", Plan)

    def start(self, digest: str) -> RunSummary:
        """Start the run of a plan that was shown; the same run when it is asked for again."""
        return self._call("POST", "/api/runs", RunSummary, StartRequest(digest=digest))

    def runs(self) -> list[RunSummary]:
        """Newest first."""
        return self._call("GET", "/api/runs", list[RunSummary])

    def run(self, run_id: str, wait_s: float = 0) -> RunStatus:
        """The run's status; with `wait_s` the server answers when something changed, at the latest after that long."""
        return self._call("GET", f"/api/runs/{_segment(run_id)}", RunStatus, params={"wait": wait_s} if wait_s else None)

    def latest(self) -> RunSummary:
        runs = self.runs()
        if not runs:
            raise ControlError("there is no run yet: start one with `rl run` or /rl:run")
        return max(runs, key=lambda run: run.created)

    def stop(self, run_id: str) -> RunSummary:
        return self._call("POST", f"/api/runs/{_segment(run_id)}/stop", RunSummary)

    def steps(self, run_id: str) -> list[StepRow]:
        return self._call("GET", f"/api/runs/{_segment(run_id)}/steps", list[StepRow])

    def trials(self, run_id: str, page: int = 1000) -> list[TrialRow]:
        """All trials of the run, `page` at a time."""
        found: list[TrialRow] = []
        while len(found) % page == 0:
            params = {"limit": page, "offset": len(found)}
            rows = self._call("GET", f"/api/runs/{_segment(run_id)}/trials", list[TrialRow], params=params)
            found += rows
            if not rows:
                break
        return found

    def trial(self, run_id: str, trial_id: str) -> TrialDetail:
        return self._call("GET", f"/api/runs/{_segment(run_id)}/trials/{_segment(trial_id)}", TrialDetail)

    def capture(self, run_id: str, trial_id: str) -> CaptureRecord:
        return self._call("GET", f"/api/runs/{_segment(run_id)}/trials/{_segment(trial_id)}/capture", CaptureRecord)

    def trajectory(self, run_id: str, trial_id: str) -> dict[str, Any]:
        """In ATIF, which is no model of ours."""
        return self._call("GET", f"/api/runs/{_segment(run_id)}/trials/{_segment(trial_id)}/trajectory", dict[str, Any])

    def tokens(self, run_id: str, trial_id: str, turn: int) -> TurnTokens:
        path = f"/api/runs/{_segment(run_id)}/trials/{_segment(trial_id)}/capture/tokens"
        return self._call("GET", path, TurnTokens, params={"turn": turn})

    def diagnose(self, run_id: str, explain: bool = False) -> Diagnosis:
        """`explain` asks the server's language model and may take a minute."""
        timeout = 120 if explain else TIMEOUT_S
        return self._call("POST", f"/api/runs/{_segment(run_id)}/diagnose", Diagnosis, DiagnoseRequest(explain=explain), timeout=timeout)

    def review(self, finding_id: str, verdict: Verdict, note: str = "") -> Finding:
        return self._call("POST", f"/api/findings/{_segment(finding_id)}/review", Finding, ReviewRequest(verdict=verdict, note=note))

    def dashboard(self, run_id: str | None = None) -> str:
        """Where a browser sees the run, or all runs."""
        return f"{self.url}/runs/{_segment(run_id)}" if run_id else self.url + "/"

    def _call(
        self,
        method: str,
        path: str,
        answer: type[T],
        body: BaseModel | None = None,
        params: dict[str, Any] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> T:
        content = body.model_dump_json() if body else None
        headers = {"content-type": "application/json"} if body else None
        try:
            response = self._http.request(method, path, content=content, headers=headers, params=params, timeout=timeout)
        except httpx.ConnectError:
            raise ServerAbsent(f"no server answers at {self.url}: run `rl up`") from None
        except httpx.UnsupportedProtocol:
            raise ControlError(f"{self.url} is no address of a server: give one such as http://127.0.0.1:8420") from None
        except httpx.TimeoutException:
            raise ControlError(
                f"the server at {self.url} did not answer within {timeout:g} s: see server.log, or `rl down` and `rl up`"
            ) from None
        except httpx.TransportError as error:
            raise NoAnswer(f"the connection to {self.url} broke: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ControlError(f"cannot talk to {self.url}: {error}") from None
        if response.status_code in (401, 403):
            raise ControlError(f"the server at {self.url} refused the token ({response.status_code}): give the right one with --token-file")
        if response.is_error:
            raise ControlError(_detail(response))
        try:
            return TypeAdapter(answer).validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ControlError(
                f"{self.url}{path} answered something else ({where}: {first['msg']}): are server and `rl` the same version?"
            ) from None


def _segment(value: str) -> str:
    """One path segment. Ids come from people and models; none of ours needs quoting."""
    if not value or not all(c.isalnum() or c in "-_.:" for c in value) or value.startswith("."):
        raise ControlError(f"{value!r} is not an id: `rl status` lists the runs, `rl diagnose RUN` the findings")
    return value


def _detail(response: httpx.Response) -> str:
    """The server's own words. FastAPI answers `{"detail": text}`, or a list of `{loc, msg}` for a malformed body."""
    if response.headers.get("content-type", "").startswith("text/plain"):
        return response.text.strip()
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered {response.status_code} without an explanation: see server.log"
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(str(part) for part in entry['loc'][1:])}: {entry['msg']}" for entry in detail)
    return str(detail)
