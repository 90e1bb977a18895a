"""The trainer's surroundings in small: a runner whose trials are two model calls, and a server that keeps events."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.schemas.events import EventAck, EventBatch, StepBody
from server.schemas.outcome import Scored, Stage, Termination
from server.schemas.rundir import RunnerFile, write_atomic
from server.schemas.states import TrialState
from server.schemas.trials import TrialRequest, TrialView

TURNS = 2


class Surroundings:
    """Serves both on one port, from a thread. `steps` holds (seconds on the monotonic clock, metrics) of each step's event."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, float]]] = []
        self._stored = 0
        self._trials: dict[str, asyncio.Task[TrialView]] = {}
        routes = [
            Route("/trials", self._submit, methods=["POST"]),
            Route("/trials/{trial_id}", self._view, methods=["GET"]),
            Route("/api/runs/{run_id}/events", self._events, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), "127.0.0.1", 0, log_config=None, access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="stage", daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def announce(self, runner_file: Path) -> None:
        write_atomic(runner_file, RunnerFile(url=self.url, pid=0, boot="bench").model_dump_json())

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _submit(self, http: Request) -> Response:
        request = TrialRequest.model_validate_json(await http.body())
        self._trials[request.trial_id] = asyncio.create_task(_play(request))
        return Response(TrialView(trial_id=request.trial_id, state=TrialState.RUNNING, stage=Stage.AGENT).model_dump_json(), 202)

    async def _view(self, http: Request) -> Response:
        view = await asyncio.shield(self._trials[http.path_params["trial_id"]])
        return Response(view.model_dump_json())

    async def _events(self, http: Request) -> Response:
        for event in EventBatch.model_validate_json(await http.body()).events:
            if event.seq > self._stored and isinstance(event.body, StepBody):
                self.steps.append((time.monotonic(), event.body.metrics))
            self._stored = max(self._stored, event.seq)
        return Response(EventAck(stored=self._stored).model_dump_json())


async def _play(request: TrialRequest) -> TrialView:
    """Odd samples succeed, so every group has signal."""
    headers = {"authorization": f"Bearer {request.proxy.key.get_secret_value()}"}
    messages = [{"role": "user", "content": request.task}]
    async with httpx.AsyncClient(timeout=60, trust_env=False, headers=headers) as client:
        for _ in range(TURNS):
            answer = await client.post(f"{request.proxy.url}/v1/chat/completions", json={"model": "policy", "messages": messages})
            if answer.status_code != httpx.codes.OK:
                break
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    reward = int(request.trial_id.rpartition("-")[2]) % 2
    outcome = Scored(reward=1 if reward else 0, termination=Termination.COMPLETED)
    return TrialView(trial_id=request.trial_id, state=TrialState.SCORED, stage=Stage.DONE, outcome=outcome, exit_code=0)
