"""What a trial costs: a real runner process, driven over HTTP against a scripted model that lists, reads, repairs and submits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil

from server.schemas.outcome import Scored, Stage
from server.schemas.rundir import RunDir, RunFile, RunnerFile, write_atomic
from server.schemas.runspec import Harness, RunSpec
from server.schemas.states import TERMINAL_TRIAL_STATES
from server.schemas.tasks import TRAIN, TaskEntry
from server.schemas.trials import TrialView

from .scripted import SUBMIT, scripted_model

READY_S = 180


async def run(harness: Harness, runtimes: Path, n: int, concurrency: int) -> dict[str, object]:
    """Figures of `n` trials, `concurrency` at a time. CPU seconds are those of the runner with all its descendants, sandboxes included."""
    with tempfile.TemporaryDirectory(prefix="lego-bench-") as scratch:
        run = RunDir(Path(scratch))
        token = secrets.token_urlsafe(24)
        spec = RunSpec.model_validate(
            {
                "model": {"path": "builtin:none"},
                "harnesses": [harness.model_dump()],
                "data": {"family": "onebug", "train_tasks": max(1, n // 8), "held_out_tasks": 1},
                "sandbox": {"concurrency": concurrency},
            }
        )
        file = RunFile(run_id="bench", server_url="http://127.0.0.1:9", event_token=token, runner_token=token, runtimes=runtimes, spec=spec)
        write_atomic(run.run_file, file.model_dump_json())
        async with _runner(run) as (process, startup_s):
            entries = [TaskEntry.model_validate_json(line) for line in (run.tasks / TRAIN / "index.jsonl").read_text().splitlines()]
            tasks = [entries[number % len(entries)].task for number in range(n)]
            scripts = {f"t{number}": _script(run.tasks / TRAIN / task) for number, task in enumerate(tasks)}
            async with scripted_model(lambda rollout, turn: scripts[rollout][turn] if turn < len(scripts[rollout]) else None) as url:
                await _play(run, token, url, harness.name, {"t0": tasks[0]}, "warm")
                before, started = _cpu(process.pid), time.monotonic()
                views = await _play(run, token, url, harness.name, {f"t{number}": task for number, task in enumerate(tasks)}, "")
                wall, after = time.monotonic() - started, _cpu(process.pid)
                cpu = {part: round((seconds - before.get(part, 0)) / n, 4) for part, seconds in after.items()}
    return _figures(views, wall, cpu, startup_s, n)


def _script(task: Path) -> list[str]:
    repair = (task / "solution" / "solve.sh").read_text().splitlines()[-1]
    return ["ls", "cat *.py", repair, SUBMIT]


@contextlib.asynccontextmanager
async def _runner(run: RunDir) -> AsyncIterator[tuple[asyncio.subprocess.Process, float]]:
    started = time.monotonic()
    log = run.root / "runner.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "sandbox.runner", "--run-dir", str(run.root), stderr=errors
        )
    try:
        while not run.runner_file.exists():
            if process.returncode is not None or time.monotonic() - started > READY_S:
                raise RuntimeError(f"the runner did not start: {log.read_text()[-1000:]}")
            await asyncio.sleep(0.05)
        yield process, time.monotonic() - started
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _play(run: RunDir, token: str, model: str, harness: str, tasks: dict[str, str], prefix: str) -> list[TrialView]:
    runner = RunnerFile.model_validate_json(run.runner_file.read_bytes())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=90, limits=limits, trust_env=False) as client:

        async def one(name: str, task: str) -> TrialView:
            proxy = {"url": f"{model}/rollout/{name}", "key": secrets.token_urlsafe(32)}
            body = {"trial_id": prefix + name, "task": task, "harness": harness, "proxy": proxy}
            (await client.post(f"{runner.url}/trials", json=body)).raise_for_status()
            while True:
                answer = await client.get(f"{runner.url}/trials/{prefix}{name}", params={"wait": 30})
                view = TrialView.model_validate_json(answer.raise_for_status().content)
                if view.state in TERMINAL_TRIAL_STATES:
                    return view

        return await asyncio.gather(*(one(name, task) for name, task in tasks.items()))


def _cpu(pid: int) -> dict[str, float]:
    """CPU seconds since start by part: the runner itself, each process below it, and what those have waited for."""
    root = psutil.Process(pid)
    parts = {"runner": root.cpu_times().user + root.cpu_times().system}
    for process in root.children():
        part = "harness" if "mini_parent" in " ".join(process.cmdline()) else "sandboxes"
        for member in (process, *process.children(recursive=True)):
            times = member.cpu_times()
            own, waited = times.user + times.system, times.children_user + times.children_system
            name = f"{part} parent" if member == process else part
            parts[name] = parts.get(name, 0) + own
            parts[part] = parts.get(part, 0) + waited
    return parts


def _figures(views: list[TrialView], wall: float, cpu: dict[str, float], startup_s: float, n: int) -> dict[str, object]:
    stages = {
        stage.value: round(statistics.median(lengths), 4)
        for stage in Stage
        if (lengths := [t.finished - t.started for view in views for t in view.timings if t.stage is stage and t.finished])
    }
    rewards = [view.outcome.reward for view in views if isinstance(view.outcome, Scored)]
    failures = [json.loads(view.outcome.model_dump_json()) for view in views if view.outcome and not isinstance(view.outcome, Scored)]
    return {
        "trials": n,
        "solved": sum(rewards),
        "failed": len(failures),
        "first_failure": failures[0] if failures else None,
        "startup_s": round(startup_s, 2),
        "wall_s": round(wall, 2),
        "trials_per_s": round(n / wall, 2),
        "cpu_s_per_trial": round(sum(cpu.values()), 4),
        "cpu_s_per_trial_by_part": cpu,
        "stage_p50_s": stages,
    }
