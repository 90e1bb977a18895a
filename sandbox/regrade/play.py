"""One more verdict on one archived diff.

`separate` goes the way of every trial, through Harbor, an agent's sandbox, a collected diff and a fresh sandbox for the grader; only that
the agent does nothing and the diff is the archived one. `shared` is what a verifier in the agent's own sandbox would have said: every file
of the agent's stays, also those that graders read by themselves, tests lie beside them, and an exit code decides. It shows what the
separate verifier is good for and is never what counts. Processes and files outside the work directory are not in a diff.
"""

from __future__ import annotations

import asyncio
import dataclasses
import marshal
from pathlib import Path
from typing import override

from sandbox.environments.archive import Change
from sandbox.environments.errors import SandboxError
from sandbox.harnesses.base import HarnessAgent, Launcher
from sandbox.harnesses.warm import interpreter
from sandbox.integrity import hidden
from sandbox.integrity.changes import Step, load
from sandbox.integrity.environment import TrialEnvironment
from sandbox.integrity.grade import CHECK, CHECK_SECONDS, INSIDE
from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import decide
from sandbox.runner.selftest import NO_PROXY, SILENT
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.runspec import Harness
from server.schemas.trials import TrialRequest

ARCHIVED = "archived"
_TESTS = "/tests"
_APPLY = "apply(*marshal.loads(take(0)))\n"


class Archived(HarnessAgent):
    """No agent: the diff in the file that the launcher's script names is what there is to grade."""

    @staticmethod
    @override
    def name() -> str:
        return ARCHIVED

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        self.rollout.on_start()
        steps = await asyncio.to_thread(load, Path(self.rollout.launcher.script))
        environment.changes = [Change(path, kind, mode, data) for kind, path, mode, data in steps]  # type: ignore[arg-type]
        await self.look(environment, steps)

    async def look(self, environment: TrialEnvironment, steps: list[Step]) -> None:
        """What there is to do in the agent's sandbox."""


class Shared(Archived):
    """Applies the whole diff in the agent's sandbox, brings the tests there, and takes the exit code of their run for its own."""

    @override
    async def look(self, environment: TrialEnvironment, steps: list[Step]) -> None:
        sandbox, work = environment.sandbox, environment.workdir
        program = (await asyncio.to_thread(INSIDE.read_text, encoding="utf-8")).removesuffix("main()\n") + _APPLY
        payload = marshal.dumps((work, steps))
        command = [interpreter(), "-I", "-S", "-B", "-c", program]
        applied = await sandbox.exec(command, stdin=len(payload).to_bytes(8, "big") + payload)
        if applied.return_code != 0:
            raise SandboxError(f"the diff cannot be applied: {applied.stderr.decode(errors='replace')[-300:]}")
        tests = self.rollout.task / "tests"
        if (tests / CHECK).exists():
            await sandbox.upload(tests, _TESTS, "root")
            command, env = [interpreter(), f"{_TESTS}/{CHECK}", work], {}
        else:
            for name, package in (await asyncio.to_thread(hidden.packages)).items():
                await sandbox.exec(
                    ["/bin/mkdir", "-p", f"{hidden.PYTEST_AT}/{name}"] if package.is_dir() else ["/bin/mkdir", "-p", hidden.PYTEST_AT],
                    user="root",
                )
                await sandbox.upload(package, f"{hidden.PYTEST_AT}/{name}", "root")
            await sandbox.upload(tests, f"{work}/{hidden.DIRECTORY}", "root")
            command, env = [interpreter(), "-m", "pytest", "-q", hidden.DIRECTORY], {"PYTHONPATH": hidden.PYTEST_AT}
        self.exit_code = (await sandbox.exec(command, cwd=work, env=env, timeout_s=CHECK_SECONDS)).return_code


async def separate(room: Room, trial_id: str, task: str, split: str, diff: Path) -> Scored | Failed:
    """The verdict of a fresh sandbox; `Failed` when there was none to be had."""
    return (await _attempt(room, Archived, trial_id, task, split, diff))[0]


async def shared(room: Room, trial_id: str, task: str, split: str, diff: Path) -> Scored | Failed:
    """The verdict of a verifier in the agent's sandbox."""
    outcome, exit_code = await _attempt(room, Shared, trial_id, task, split, diff)
    if exit_code is None:
        return (
            outcome if isinstance(outcome, Failed) else Failed(stage=Stage.VERIFIER, cause=Cause.VERIFIER, detail="the check did not run")
        )
    return Scored(reward=0 if exit_code else 1, termination=Termination.COMPLETED, detail=f"a shared verifier: exit status {exit_code}")


async def _attempt(
    room: Room, agent: type[HarnessAgent], trial_id: str, task: str, split: str, diff: Path
) -> tuple[Scored | Failed, int | None]:
    launcher = Launcher(Harness(name=ARCHIVED, version="1"), script=str(diff))
    room = dataclasses.replace(room, launchers={ARCHIVED: launcher}, agents={ARCHIVED: agent})
    budgets = room.spec.sandbox.budgets
    request = TrialRequest(trial_id=trial_id, task=task, split=split, harness=ARCHIVED, proxy=NO_PROXY, budgets=budgets)
    attempt = Attempt(room, request, trial_id, SILENT)
    return decide(await attempt.run()), attempt.exit_code
