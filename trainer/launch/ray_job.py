"""`trainer.launcher: ray`: the trainer as a job of a Ray cluster that exists, followed from here as if it were a process of its own.

This process stands in for the trainer: it prints the job's log, ends with the job's exit code, and stops the job when it is told to end.
The job runs `python -m trainer.launch` on the cluster's head, so the run's directory and this environment must lie at the same path there.
A job's name says whose it is; one that an earlier start left behind is stopped before the next begins, and no other is ever touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from server.schemas.rundir import RunDir, RunFile

from . import FAILED, FINAL, TERMINATED, FinalError, environment

POLL_S = 0.5
AGENT_S = 60
STOP_S = 30
"""How long Ray may take to end a job."""
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


def submit(run: RunDir, file: RunFile, attempt: int) -> int:
    """Run the trainer as a job to its end; its exit code, or FAILED when Ray lost it."""
    job = name(file.run_id, attempt)
    try:
        client = _client(file.spec.trainer.cluster.jobs)
        for earlier in range(1, attempt):
            _stop(client, name(file.run_id, earlier))
        command = [sys.executable, "-P", "-m", "trainer.launch", "--run-dir", str(run.root), "--attempt", str(attempt), "--in-job"]
        _submit(client, job, shlex.join(command), environment.settings(file.spec.trainer.device))
    except FinalError as error:
        print(f"failed: {error}")
        return FINAL
    return asyncio.run(_follow(client, job))


def name(run_id: str, attempt: int) -> str:
    return f"lego-rl-{run_id}-{attempt}"


def _client(address: str) -> Any:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
        client.list_jobs()
        return client
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        raise FinalError(f"trainer.cluster.jobs: no Ray Jobs API answers at {address}: {_line(error)}") from error


def _submit(client: Any, job: str, command: str, variables: dict[str, str]) -> None:
    """A cluster that has just started answers before it has an agent that could run a job."""
    deadline = time.monotonic() + AGENT_S
    while True:
        try:
            client.submit_job(entrypoint=command, submission_id=job, runtime_env={"env_vars": variables})
            return
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise FinalError(f"the Ray cluster does not take the job {job}: {_line(error)}") from error
            time.sleep(POLL_S)


async def _follow(client: Any, job: str) -> int:
    """The job's log as it is written, then how it ended."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    log = asyncio.create_task(_print_log(client, job))
    ended = asyncio.create_task(_ended(client, job))
    asked = asyncio.create_task(told.wait())
    await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
    if told.is_set():
        await asyncio.to_thread(_stop, client, job)
    asked.cancel()
    details = await ended
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(log, STOP_S)
    if told.is_set():
        return TERMINATED
    if details.driver_exit_code is None and str(details.status) != "SUCCEEDED":
        print(f"failed: Ray lost the job {job}: {details.message}")
    code = details.driver_exit_code
    return code if code is not None else FAILED


async def _print_log(client: Any, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


async def _ended(client: Any, job: str) -> Any:
    while True:
        details = await asyncio.to_thread(client.get_job_info, job)
        if str(details.status) in OVER:
            return details
        await asyncio.sleep(POLL_S)


def _stop(client: Any, job: str) -> None:
    """One of ours, whether it runs, has ended or never was."""
    known = {details.submission_id: str(details.status) for details in client.list_jobs()}
    if known.get(job, "STOPPED") not in OVER:
        client.stop_job(job)
        _until(lambda: str(client.get_job_status(job)) in OVER)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STOP_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
