"""Async client of the sandbox runner. It survives a restart of the runner: `runner.json` says where the present one listens.

A trial belongs to the `boot` that accepted it. When that boot is gone the trial is lost; nothing is submitted twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import httpx
from pydantic import ValidationError

from server.schemas.outcome import Cause, Failed, Stage
from server.schemas.rundir import RunnerFile
from server.schemas.states import TERMINAL_TRIAL_STATES
from server.schemas.trials import RunnerHealth, TrialRequest, TrialView
from trainer.launch import FinalError

log = logging.getLogger(__name__)

POLL_S = 20
"""Length of one long poll."""
GRACE_S = 120.0
"""How long an unreachable runner may take to come back before its trials count as lost."""
RETRY_S = 0.25


class RunnerRefused(FinalError):
    """The runner answered that the request itself is wrong. Every trial would meet it, so the run cannot go on."""


class _Lost(Exception):
    """The boot that held the trial is gone, or no runner came back in time."""


class RunnerClient:
    def __init__(self, runner_file: Path, token: str, grace_s: float = GRACE_S) -> None:
        self._path = runner_file
        self._grace_s = grace_s
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(10, read=POLL_S + 10),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> RunnerHealth:
        """Raises httpx.HTTPError when the runner does not answer."""
        return RunnerHealth.model_validate_json((await self._http.get(f"{self._read().url}/healthz")).raise_for_status().content)

    async def run(self, request: TrialRequest) -> TrialView | Failed:
        """Submit a trial and wait for its end. `Failed(runner_lost)` when the runner died with it. Cancelling cancels the trial.

        Raises RunnerRefused when the runner says that the request is wrong.
        """
        stage = Stage.QUEUED
        try:
            runner = await self._submit(request)
            try:
                while True:
                    view = await self._poll(runner, request.trial_id)
                    stage = view.stage
                    if view.state in TERMINAL_TRIAL_STATES:
                        return view
            except asyncio.CancelledError:
                await self._cancel(runner, request.trial_id)
                raise
        except _Lost as lost:
            return Failed(stage=stage, cause=Cause.RUNNER_LOST, detail=str(lost))

    def _read(self) -> RunnerFile:
        return RunnerFile.model_validate_json(self._path.read_bytes())

    async def _submit(self, request: TrialRequest) -> RunnerFile:
        """The runner that accepted the trial. Only a connection that was never made is tried again on another boot."""
        deadline = time.monotonic() + self._grace_s
        runner = await self._present(deadline)
        while True:
            try:
                response = await self._http.post(f"{runner.url}/trials", json=request.model_dump(mode="json"))
            except asyncio.CancelledError:
                await self._cancel(runner, request.trial_id)  # the runner may have it, although it did not say so yet
                raise
            except httpx.TransportError as error:
                present = await self._wait_for_runner(deadline, error)
                if present.boot != runner.boot and not isinstance(error, httpx.ConnectError):
                    raise _Lost(f"the runner restarted while {request.trial_id} was being submitted") from error
                runner = present
                continue
            if response.is_client_error:
                raise RunnerRefused(f"the runner refused trial {request.trial_id}: HTTP {response.status_code} {response.text[:500]}")
            if response.is_success:
                return runner
            await self._pause(deadline, f"HTTP {response.status_code}")

    async def _poll(self, runner: RunnerFile, trial_id: str) -> TrialView:
        deadline = time.monotonic() + self._grace_s + POLL_S
        while True:
            try:
                response = await self._http.get(f"{runner.url}/trials/{trial_id}", params={"wait": POLL_S})
            except httpx.TransportError as error:
                present = await self._wait_for_runner(deadline, error)
                if present.boot != runner.boot:
                    raise _Lost(f"the runner restarted (boot {runner.boot} → {present.boot}) while {trial_id} ran") from error
                continue
            if response.status_code == httpx.codes.NOT_FOUND:
                raise _Lost(f"the runner does not know {trial_id}: it was restarted")
            if response.is_success:
                return TrialView.model_validate_json(response.content)
            await self._pause(deadline, f"HTTP {response.status_code}")

    async def _wait_for_runner(self, deadline: float, error: httpx.TransportError) -> RunnerFile:
        """What runner.json says a moment later; it may be the same boot, which was only slow."""
        await self._pause(deadline, f"{type(error).__name__} {error}")
        return await self._present(deadline)

    async def _present(self, deadline: float) -> RunnerFile:
        """Where the runner listens. Between the end of one and the readiness of the next there is no file."""
        while True:
            try:
                return self._read()
            except (OSError, ValidationError) as unreadable:
                await self._pause(deadline, str(unreadable))

    async def _pause(self, deadline: float, reason: str) -> None:
        if time.monotonic() >= deadline:
            raise _Lost(f"the runner did not answer for {self._grace_s:.0f} s: {reason}")
        await asyncio.sleep(RETRY_S)

    async def _cancel(self, runner: RunnerFile, trial_id: str) -> None:
        try:
            await self._http.delete(f"{runner.url}/trials/{trial_id}", timeout=2)
        except httpx.HTTPError as error:
            log.warning("could not cancel trial %s, its own deadlines will end it: %s", trial_id, error)
