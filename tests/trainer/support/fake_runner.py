"""A runner that is a real HTTP server and plays the harness itself: OpenAI chat requests to the rollout's proxy, then an outcome.

`play` decides what a trial does. Everything the trainer sees goes over sockets, as with the real one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.rundir import RunnerFile, write_atomic
from server.schemas.states import TrialState
from server.schemas.trials import RunnerHealth, TrialRequest, TrialView

from .served import Served

Outcome = Scored | Failed
Play = Callable[["Harness", TrialRequest], Awaitable[Outcome]]


class Harness:
    """The client side of one trial. `chat` sends the whole history, as harnesses do."""

    def __init__(self, http: httpx.AsyncClient, request: TrialRequest) -> None:
        self._http = http
        self._url = f"{request.proxy.url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {request.proxy.key.get_secret_value()}"}

    async def chat(self, messages: list[dict[str, Any]], longest: int = 4096) -> dict[str, Any] | None:
        """The assistant's message; None when the proxy refuses (turn cap, overflow, ended)."""
        body = {"model": "policy", "messages": messages, "max_tokens": longest}
        response = await self._http.post(self._url, json=body, headers=self._headers)
        if response.status_code != httpx.codes.OK:
            return None
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message


class FakeRunner:
    """Runs in a thread with an event loop of its own. `boot` is new for every instance, as for every process."""

    def __init__(self, runner_file: Path, token: str, play: Play) -> None:
        self.boot = uuid.uuid4().hex
        self.requests: list[TrialRequest] = []
        self.cancelled: list[str] = []
        self.fail_next: list[int] = []
        """Status codes to answer with before anything else."""
        self._views: dict[str, TrialView] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runner_file, self._token, self.play = runner_file, token, play
        self._served: Served | None = None

    def start(self, port: int = 0) -> str:
        """Listen, then say where in runner.json."""
        app = Starlette(
            routes=[
                Route("/trials", self._submit, methods=["POST"]),
                Route("/trials/{trial_id}", self._view, methods=["GET"]),
                Route("/trials/{trial_id}", self._cancel, methods=["DELETE"]),
                Route("/healthz", self._health),
            ]
        )
        self._served = Served(app, port)
        self.url = self._served.url
        write_atomic(self._runner_file, RunnerFile(url=self.url, pid=0, boot=self.boot).model_dump_json())
        return self.url

    def stop(self) -> None:
        assert self._served is not None
        self._served.stop()

    async def _submit(self, http: Request) -> Response:
        if self.fail_next:
            return Response("not now", self.fail_next.pop(0))
        if http.headers.get("authorization") != f"Bearer {self._token}":
            return JSONResponse({"detail": "wrong token"}, 401)
        request = TrialRequest.model_validate_json(await http.body())
        self.requests.append(request)
        if request.trial_id not in self._views:
            self._views[request.trial_id] = TrialView(trial_id=request.trial_id, state=TrialState.RUNNING, stage=Stage.AGENT)
            self._tasks[request.trial_id] = asyncio.create_task(self._run(request))
        return Response(self._views[request.trial_id].model_dump_json(), 202)

    async def _run(self, request: TrialRequest) -> None:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            try:
                outcome = await self.play(Harness(client, request), request)
            except Exception as error:  # noqa: BLE001 a test's script that fails must end its trial, not hang it
                outcome = Failed(stage=Stage.AGENT, cause=Cause.AGENT_SETUP, detail=f"the test's script failed: {error!r}")
        state = TrialState.SCORED if isinstance(outcome, Scored) else TrialState.FAILED
        stage = Stage.DONE if isinstance(outcome, Scored) else outcome.stage
        self._views[request.trial_id] = TrialView(trial_id=request.trial_id, state=state, stage=stage, outcome=outcome, exit_code=0)

    async def _view(self, http: Request) -> Response:
        trial_id = http.path_params["trial_id"]
        if trial_id not in self._views:
            return JSONResponse({"detail": "unknown"}, 404)
        await asyncio.wait([self._tasks[trial_id]], timeout=float(http.query_params.get("wait", 0)))
        return Response(self._views[trial_id].model_dump_json())

    async def _cancel(self, http: Request) -> Response:
        trial_id = http.path_params["trial_id"]
        if trial_id not in self._tasks:
            return JSONResponse({"detail": "unknown"}, 404)
        self.cancelled.append(trial_id)
        self._tasks[trial_id].cancel()
        outcome = Failed(stage=Stage.AGENT, cause=Cause.CANCELLED)
        self._views[trial_id] = TrialView(trial_id=trial_id, state=TrialState.FAILED, stage=Stage.AGENT, outcome=outcome)
        return Response(status_code=204)

    async def _health(self, _: Request) -> Response:
        return Response(RunnerHealth(boot=self.boot, live=len(self._tasks), limits="none").model_dump_json())


def scored(reward: int) -> Scored:
    return Scored(reward=1 if reward else 0, termination=Termination.COMPLETED)
