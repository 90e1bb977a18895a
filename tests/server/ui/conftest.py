"""A real server process over a data directory that holds one run, and a real browser."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from server.db import Database
from server.db.models import PlanRow, Run
from server.events import ingest
from server.launchers.supervisor import record
from server.schemas.capture import CaptureRecord
from server.schemas.datadir import DataDir, ServerFile
from server.schemas.events import Event
from server.schemas.rundir import RunDir
from server.schemas.states import RunState
from server.spec import resolve

ARTIFACTS = Path(__file__).parents[3] / ".artifacts"
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataDir]:
    """A run of 12 steps, of which 5 are done and the sixth is forming; its rewards rise and some trials failed.

    Its supervisor is a process that only sleeps: a run without any is soon concluded.
    """
    data = DataDir(tmp_path_factory.mktemp("data"))
    db = Database(f"sqlite:///{data.database}")
    db.migrate()
    spec = resolve({"extends": "local"}, {}).spec.model_dump(mode="json")
    with db.write() as session:
        session.add(PlanRow(digest="d", spec=spec, provenance={}, summary="", created=0))
        session.flush()
        session.add(
            Run(
                run_id="r1",
                name="demo",
                digest="d",
                state=RunState.STARTING,
                token_sha256="",
                steps_expected=12,
                created=time.time(),
                started=time.time(),
            )
        )
    ingest(db, "r1", run_events(data.runs / "r1" / "captures"))
    db.close()
    supervisor = subprocess.Popen(["sleep", "600"])
    record(RunDir(data.runs / "r1"), supervisor.pid, "supervisor")
    yield data
    supervisor.kill()
    supervisor.wait()


def run_events(captures: Path) -> list[Event]:
    captures.mkdir(parents=True)
    rng = random.Random(0)
    bodies: list[dict[str, Any]] = [{"type": "run_state", "state": "running"}]
    bodies += evaluation(0, 33)
    for step in range(1, 7):
        for task in range(8):
            group = f"s{step:03}-t{task}"
            bodies.append(
                {
                    "type": "group",
                    "group_id": group,
                    "step": step,
                    "phase": "train",
                    "task": f"task-{task}",
                    "harness": "mini-swe-agent",
                    "size": 8,
                }
            )
            for sample in range(8):
                trial = f"{group}-{sample}"
                bodies.append(
                    {"type": "trial", "trial_id": trial, "state": "queued", "stage": "queued", "group_id": group, "sample": sample}
                )
                if step == 6 and task > 4:
                    continue
                bodies.append({"type": "outcome", "trial_id": trial, "outcome": outcome(step, sample, rng)})
                bodies.append(capture(captures, trial))
        if step < 6:
            bodies.append(
                {
                    "type": "step",
                    "step": step,
                    "metrics": {"training/rollout_actor_probs_pearson_corr": 0.9999 + step * 1e-5, "actor/grad_norm": 0.4},
                }
            )
    return [Event.model_validate({"source": "trainer", "seq": n, "time": 1000.0 + n, "body": body}) for n, body in enumerate(bodies, 1)]


def evaluation(step: int, resolved: int) -> list[dict[str, Any]]:
    return [{"type": "evaluation", "step": step, "resolved": resolved, "executed": 96, "total": 96}]


def outcome(step: int, sample: int, rng: random.Random) -> dict[str, Any]:
    if sample >= 6 and step in (2, 6):
        return {"kind": "failed", "stage": "sandbox_setup", "cause": "sandbox_setup", "detail": f"no space left {HOSTILE}"}
    return {"kind": "scored", "reward": int(rng.random() < 0.3 + 0.08 * step), "termination": "completed"}


def capture(directory: Path, trial: str) -> dict[str, Any]:
    turn = {"branch": 0, "prompt_tokens": 58, "sampled_tokens": 17, "finish": "tool_calls"}
    call = {"id": "c1", "name": "bash", "arguments": '{"command": "cat cart.py"}'}
    turns = [
        {"index": 0, "context": [("user", f"Fix it. {HOSTILE}")], "tool_calls": [call]} | turn,
        {"index": 1, "context": [("tool", HOSTILE)], "text": f"Done. {HOSTILE}"} | turn | {"finish": "stop"},
    ]
    branches = [{"index": 0, "reason": "root", "branch_class": "policy", "tokens": 120, "sampled_tokens": 34}]
    events = [
        {"kind": "tool", "call_id": "c1", "name": "bash", "seconds": 0.25, "ok": False},
        {"kind": "error", "name": HOSTILE, "text": HOSTILE},
    ]
    log = {"version": HOSTILE, "end": HOSTILE, "exit_code": 1, "turns": 2, "malformed": 3, "events": events}
    record = CaptureRecord.model_validate(
        {"trial_id": trial, "harness": "mini-swe-agent", "turns": turns, "branches": branches, "sampled_tokens": 34, "log": log}
    )
    raw = record.model_dump_json().encode()
    (directory / f"{trial}.json").write_bytes(raw)
    return {
        "type": "capture",
        "trial_id": trial,
        "path": f"captures/{trial}.json",
        "size": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "turns": 2,
        "branches": 1,
        "sampled_tokens": 34,
        "tool_calls": 1,
    }


@pytest.fixture(scope="module")
def server(data: DataDir) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-m", "server", "--port", "0", "--data-dir", str(data.root)])
    try:
        while not data.server_file.exists():
            assert process.poll() is None, "the server ended before it listened"
            time.sleep(0.05)
        yield ServerFile.model_validate_json(data.server_file.read_bytes()).url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def append(data: DataDir, server: str) -> Callable[[list[dict[str, Any]]], None]:
    """Report further events of a source of their own, as a trainer would."""
    return _sender(data, server, "late")


@pytest.fixture(scope="module")
def append_more(data: DataDir, server: str) -> Callable[[list[dict[str, Any]]], None]:
    return _sender(data, server, "later")


def _sender(data: DataDir, server: str, source: str) -> Callable[[list[dict[str, Any]]], None]:
    def send(bodies: list[dict[str, Any]]) -> None:
        events = [{"source": source, "seq": n, "time": 9000.0 + n, "body": body} for n, body in enumerate(bodies, 1)]
        token = data.token.read_text().strip()
        answer = httpx.post(
            f"{server}/api/runs/r1/events", json={"events": events}, headers={"authorization": f"Bearer {token}"}, timeout=60
        )
        answer.raise_for_status()

    return send


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    quiet = (
        "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=quiet.split(), timeout=120_000)
        expect.set_options(timeout=60_000)  # it bounds a hang only
        yield browser
        browser.close()
