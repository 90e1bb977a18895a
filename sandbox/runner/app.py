"""The runner's HTTP interface (`server/schemas/trials.py`)."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response

from server.schemas.trials import Identifier, RunnerHealth, TrialRequest, TrialView

from .metrics import CONTENT_TYPE
from .trials import BadRequest, Closed, TrialConflict, Trials

MAX_WAIT_S = 60


def create_app(trials: Trials, token: str, boot: str, limits: str) -> FastAPI:
    app = FastAPI(title="lego-rl trial runner", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(_guard(token))])

    @app.get("/healthz")
    async def healthz() -> RunnerHealth:
        return RunnerHealth(boot=boot, live=trials.live, limits=limits)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(trials.metrics.text(), media_type=CONTENT_TYPE)

    @app.post("/trials", status_code=202)
    async def submit(request: TrialRequest) -> TrialView:
        try:
            return trials.submit(request)
        except TrialConflict as error:
            raise HTTPException(409, str(error)) from error
        except BadRequest as error:
            raise HTTPException(422, str(error)) from error
        except Closed as error:
            raise HTTPException(503, str(error)) from error

    @app.get("/trials/{trial_id}")
    async def view(trial_id: Identifier, wait: float = Query(default=0, ge=0, le=MAX_WAIT_S)) -> TrialView:
        try:
            return await trials.wait(trial_id, wait)
        except KeyError as error:
            raise HTTPException(404, f"no trial {trial_id}") from error

    @app.delete("/trials/{trial_id}", status_code=202)
    async def cancel(trial_id: Identifier) -> TrialView:
        try:
            return trials.cancel(trial_id)
        except KeyError as error:
            raise HTTPException(404, f"no trial {trial_id}") from error

    return app


def _guard(token: str) -> Callable[[Request], Awaitable[None]]:
    expected = f"Bearer {token}".encode()

    async def authorise(request: Request) -> None:
        if not secrets.compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise HTTPException(401, "a bearer token is required")

    return authorise
