"""One small process per run: `python -m server.launchers.supervisor --run-dir DIR`.

It starts the runner and the trainer, each in its own process group, restarts a runner that died and a trainer that left a checkpoint,
ends the runner when the trainer has ended, and writes exit.json last. It knows nothing of the server and outlives it. SIGTERM stops the
run.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ..schemas.rundir import ExitFile, RunDir, write_atomic
from .identity import MARKER, OwnedProcess, identify, kill_marked

POLL_S = 0.2
TAIL_LINES = 40
QUICK_DEATH_S = 60
MAX_QUICK_DEATHS = 5
BACKOFF_S = 0.5
FINAL = 2
"""Exit code of a trainer that would end the same way again: too many failed trials, a wrong model path, wrong usage."""

log = logging.getLogger("supervisor")


class LaunchFile(BaseModel):
    """`launch.json`: whole command lines, without secrets."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    runner: list[str]
    """Empty when trainer and runner are in a cluster: the trainer's process stands in for both, and knows itself whether there is a
    checkpoint there."""
    trainer: list[str]
    stop_grace_s: float
    trainer_restarts: int = 0
    """How often a trainer that died may be started again."""


class Supervisor:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._launch = LaunchFile.model_validate_json(run.launch_file.read_bytes())
        self._stopping = False
        self._restarts = 0
        self._trainer_restarts = 0
        self._quick_deaths = 0

    def stop(self) -> None:
        self._stopping = True

    def supervise(self) -> ExitFile:
        """Returns when neither process nor anything they started is left."""
        try:
            exit = self._supervise()
        except OSError as error:  # an interpreter that is not there, a full disk
            exit = ExitFile(
                trainer=None,
                runner_restarts=self._restarts,
                trainer_restarts=self._trainer_restarts,
                stopped=False,
                tail=[],
                reason=f"a process cannot be run: {error}",
            )
        kill_marked(f"{self._launch.run_id}/runner")
        kill_marked(f"{self._launch.run_id}/trainer")
        return exit

    def _supervise(self) -> ExitFile:
        record(self._run, os.getpid(), "supervisor")
        runner = self._start_runner()
        trainer = self._start("trainer", self._launch.trainer)
        runner_started, reason = time.monotonic(), ""
        while not self._stopping:
            if trainer.poll() is not None:
                if not self._resumable(trainer.returncode):
                    break
                runner, trainer = self._resume(runner, trainer.returncode)
                runner_started = time.monotonic()
            time.sleep(POLL_S)
            if runner is None or runner.poll() is None or trainer.poll() is not None:
                continue
            self._quick_deaths = self._quick_deaths + 1 if time.monotonic() - runner_started < QUICK_DEATH_S else 1
            if self._quick_deaths > MAX_QUICK_DEATHS:
                last = next(iter(self._tail("runner", 1)), "it said nothing")
                reason = f"the runner died {self._quick_deaths} times in a row, last with exit code {runner.returncode}: {last}"
                break
            log.warning("the runner ended with exit code %s, starting it again", runner.returncode)
            self._clear_runner()
            pause_until = time.monotonic() + BACKOFF_S * 2 ** (self._quick_deaths - 1)
            while time.monotonic() < pause_until and trainer.poll() is None and not self._stopping:
                time.sleep(POLL_S)
            self._restarts += 1
            runner, runner_started = self._start_runner(), time.monotonic()
        stopped = self._stopping and trainer.poll() is None
        code = self._end(trainer, "trainer")
        self._end_runner(runner)
        return ExitFile(
            trainer=code,
            runner_restarts=self._restarts,
            trainer_restarts=self._trainer_restarts,
            stopped=stopped,
            tail=self._tail("trainer", TAIL_LINES) if code else [],
            reason=reason,
        )

    def _resumable(self, code: int) -> bool:
        """Whether a trainer that ended with `code` would do better from its last checkpoint."""
        left = not self._launch.runner or self._run.latest_checkpoint.exists()
        return code not in (0, FINAL) and self._trainer_restarts < self._launch.trainer_restarts and left

    def _resume(self, runner: subprocess.Popen[bytes] | None, code: int) -> tuple[subprocess.Popen[bytes] | None, subprocess.Popen[bytes]]:
        """Both anew: trials of the dead trainer would hold their sandboxes until their harnesses give up."""
        self._trainer_restarts += 1
        log.warning("the trainer ended with exit code %s, going on from its last checkpoint", code)
        self._end_runner(runner)
        self._clear_runner()
        kill_marked(f"{self._launch.run_id}/trainer")
        attempt = ["--attempt", str(self._trainer_restarts + 1)]
        return self._start_runner(), self._start("trainer", [*self._launch.trainer, *attempt])

    def _start_runner(self) -> subprocess.Popen[bytes] | None:
        return self._start("runner", self._launch.runner) if self._launch.runner else None

    def _end_runner(self, runner: subprocess.Popen[bytes] | None) -> None:
        if runner is not None:
            self._end(runner, "runner")

    def _start(self, role: str, command: list[str]) -> subprocess.Popen[bytes]:
        # Without byte code on disk every worker of the trainer compiles thousands of modules again.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        with (self._run.logs / f"{role}.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self._run.root,
                env=environment | {MARKER: f"{self._launch.run_id}/{role}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        record(self._run, process.pid, role)
        log.info("%s is process %d", role, process.pid)
        return process

    def _clear_runner(self) -> None:
        """The trainer must not find the dead runner's address, nor the new one its ports taken."""
        self._run.runner_file.unlink(missing_ok=True)
        kill_marked(f"{self._launch.run_id}/runner")

    def _end(self, process: subprocess.Popen[bytes], role: str) -> int:
        """Ask the group to end, then make it."""
        for number, patience_s in ((signal.SIGTERM, self._launch.stop_grace_s), (signal.SIGKILL, None)):
            if process.poll() is not None:
                break
            os.killpg(process.pid, number)  # our own child, not yet waited for: the number is its
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                log.warning("%s did not end within %g s, killing it", role, self._launch.stop_grace_s)
        log.info("%s ended with exit code %s", role, process.returncode)
        return process.wait()

    def _tail(self, role: str, lines: int) -> list[str]:
        text = (self._run.logs / f"{role}.log").read_bytes()[-64 * 1024 :].decode(errors="replace")
        return text.splitlines()[-lines:]


def record(run: RunDir, pid: int, role: str) -> None:
    """Add a process that was just started to the ledger."""
    identity = identify(pid)
    if identity is None:
        return  # it has ended already: there is nothing to own
    line = OwnedProcess(**identity.model_dump(), role=role, started=time.time()).model_dump_json()
    with run.processes_file.open("a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run = RunDir(parser.parse_args().run_dir)
    supervisor = Supervisor(run)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    write_atomic(run.exit_file, supervisor.supervise().model_dump_json())


if __name__ == "__main__":
    main()
