"""`main` is a runner process without sandboxes. It makes the tasks, and plays trials as two model calls each.

Trials of training steps from the number in the file `hold` on wait until it is raised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from pathlib import Path

from server.schemas.events import TrialBody
from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.rundir import RunDir
from server.schemas.spool import Reporter
from server.schemas.states import TrialState
from server.schemas.trials import TrialRequest
from tests.trainer.support.fake_runner import FakeRunner, Harness, scored

TASKS = 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    run = RunDir(parser.parse_args().run_dir)
    file = run.load()
    for split in ("train", "held_out"):
        folder = run.tasks / split
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"task": f"{split}-{i}", "kind": "", "instruction": "repair it"}) for i in range(TASKS)]
        (folder / "index.jsonl").write_text("\n".join(lines))
    reporter = Reporter(file.server_url, file.run_id, file.event_token, "runner", run.spool)

    async def play(client: Harness, request: TrialRequest) -> Scored | Failed:
        reporter.report(TrialBody(trial_id=request.trial_id, state=TrialState.RUNNING, stage=Stage.AGENT))
        messages = [{"role": "user", "content": f"repair {request.task}"}]
        for _ in range(2):
            while request.split == "train" and step_of(request) >= held_from(run):  # noqa: ASYNC110 another process lets go
                await asyncio.sleep(0.05)
            if (reply := await client.chat(messages)) is None:
                return Failed(stage=Stage.AGENT, cause=Cause.AGENT_SETUP, detail="the proxy refused")
            messages += [reply, {"role": "user", "content": "go on"}]
        return scored(int(request.trial_id[-1]) % 2)

    FakeRunner(run.runner_file, file.runner_token, play).start()
    threading.Event().wait()


def step_of(request: TrialRequest) -> int:
    """`s002r2-train-1-0` is of step 2."""
    return int(request.trial_id[1:4])


def held_from(run: RunDir) -> int:
    return int((run.root / "hold").read_text())
