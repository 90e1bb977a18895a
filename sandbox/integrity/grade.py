"""The verifier: applies the agent's diff to the pristine tree in the fresh sandbox and runs the task's check there.

What makes a reward trustworthy: the tree comes from the task, not from the agent's sandbox; nothing of the agent lives any more; the
check reaches the sandbox over a pipe when grading starts and never lies in its file system; the answer comes over a pipe that graded code
does not hold and must carry a nonce that graded code has not seen. See `inside.py` for the half that runs in the sandbox.
"""

from __future__ import annotations

import asyncio
import marshal
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

from sandbox.environments.errors import SandboxError, SandboxLost
from sandbox.harnesses.warm import interpreter
from sandbox.tasks.lean import full_task
from server.schemas.rundir import write_atomic

from . import hidden, policy
from .changes import Step
from .environment import TrialEnvironment
from .verdict import Grade, Verdict, read_verdict

CHECK = "check.py"
VERDICT_FILE = "verdict.json"
CHECK_SECONDS = 30
"""Wall clock for one run of the check; graded code that takes longer has failed."""
RUNS = 11
"""The verifier's own deadline must leave room for so many: eight at most as a rule, and the fresh sandboxes between them. Graded code may
not buy a time-out."""
INSIDE = Path(__file__).with_name("inside.py")


class Grader(BaseVerifier):
    """Harbor verifier, import path `sandbox.integrity.grade:Grader`. Writes `verdict.json` beside Harbor's own verifier output.

    `seconds` is for one run of the check. Twins share what is left of RUNS times that, so that a busy machine accuses nobody.
    """

    environment: TrialEnvironment

    def __init__(self, seconds: int = CHECK_SECONDS, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._end = 0.0
        """When grading must be over (monotonic)."""

    async def verify(self) -> VerifierResult:
        verdict = await self._verdict()
        write_atomic(self.trial_paths.verifier_dir / VERDICT_FILE, verdict.model_dump_json())
        return VerifierResult(rewards={"reward": float(verdict.grade is Grade.PASSED)})

    async def _verdict(self) -> Verdict:
        if self.environment.diff is None:
            return Verdict(grade=Grade.NOT_RUN, detail="the agent's diff did not arrive in the grading sandbox")
        self._end = time.monotonic() + RUNS * self._seconds
        task = full_task(self.task.paths.task_dir)
        plain = task / "tests" / CHECK
        if plain.exists():
            diff, reverted = policy.split(self.environment.diff, runs_tests=False)
            verdict = await self._tried_twice(diff, plain.read_text(encoding="utf-8"), self._seconds)
        else:
            diff, reverted = policy.split(self.environment.diff, runs_tests=True)
            verdict = await self._hidden_tests(task, diff)
        signs = await asyncio.to_thread(policy.suspicious, self.environment.diff)
        grade = Grade.FAILED if verdict.grade is Grade.OPAQUE else verdict.grade  # a check may end with whatever status it likes
        return verdict.model_copy(update={"grade": grade, "reverted": reverted, "signs": [*verdict.signs, *signs]})

    async def _hidden_tests(self, task: Path, diff: list[Step]) -> Verdict:
        """Only a tree that passes is graded on: a would-be reward costs up to eight runs, mostly two, anything else one."""
        try:
            checks = await asyncio.to_thread(hidden.checks, task)
        except hidden.NoTests as error:
            return Verdict(grade=Grade.NOT_RUN, detail=str(error), changed=len(diff))
        tries = 1
        if (sealed := checks["sealed"]) is not None:
            verdict = await self._without_answers(task, diff, sealed)
            if verdict.grade is Grade.PASSED:
                tries = 2  # no test has a lie in it now: who lets one fail gains nothing by another try, and a test may be flaky
            elif verdict.grade is Grade.OPAQUE:
                checks = await asyncio.to_thread(hidden.checks, task, sealed=False)
            else:
                return verdict
            await self._refresh()
        verdict = await self._judged(diff, checks["tests"] or "")
        if verdict.grade is Grade.FAILED and tries == 2:
            await self._refresh()
            verdict = _passed_before(await self._judged(diff, checks["tests"] or ""))
        return await self._twins(diff, checks) if verdict.grade is Grade.PASSED else verdict

    async def _judged(self, diff: list[Step], check: str) -> Verdict:
        verdict = await self._tried_twice(diff, check, self._seconds)
        return verdict.model_copy(update={"grade": Grade.TAMPERED}) if verdict.killed else verdict

    async def _without_answers(self, task: Path, diff: list[Step], check: str) -> Verdict:
        """OPAQUE only where the task's own solution has objects without a plain form there, too: they can claim to equal anything."""
        verdict = await self._judged(diff, check)
        solution = task / "solution" / "solve.sh"
        if verdict.grade is not Grade.OPAQUE or not solution.is_file():
            return verdict
        await self._refresh()
        try:
            script = await asyncio.to_thread(solution.read_bytes)
            await self.environment.sandbox.exec(["/bin/bash", "-s"], stdin=script, timeout_s=self._seconds)
        except SandboxError:
            return verdict
        if (await grade(self.environment, [], check, self._seconds)).grade is not Grade.PASSED:
            return verdict
        words = f"{_last_line(verdict.detail)}, where the task's own solution has a value that can be judged"
        return verdict.model_copy(update={"grade": Grade.FAILED, "detail": words, "signs": [words]})

    async def _twins(self, diff: list[Step], checks: Mapping[hidden.Variant, str | None]) -> Verdict:
        """The verdict of a tree that passes the tests as they are."""
        verdict = Verdict(grade=Grade.PASSED, changed=len(diff))
        twins = [(variant, text) for variant in hidden.TWINS if (text := checks[variant]) is not None]
        for done, (variant, text) in enumerate(twins):
            await self._refresh()
            twin = await self._tried_twice(diff, text, share(self._end - time.monotonic(), len(twins) - done, self._seconds))
            if twin.grade in (Grade.NOT_RUN, Grade.TIMEOUT):
                return twin
            if twin.grade is Grade.FAILED:  # a test that is what it was did not pass again
                return _passed_before(twin)
            if twin.grade is not Grade.PASSED:
                return twin.model_copy(
                    update={"grade": Grade.TAMPERED, "detail": f"{variant}: {twin.detail or 'it did not come to its end'}"}
                )
        return verdict

    async def _tried_twice(self, diff: list[Step], check: str, seconds: int) -> Verdict:
        """Again in a fresh sandbox where grading did not begin, and where a kill decided: graded code that ends its grader does so again,
        the machine hardly."""
        verdict = await grade(self.environment, diff, check, seconds)
        left = int(self._end - time.monotonic() - _margin(self._seconds))
        if verdict.grade is Grade.NOT_RUN or ((verdict.killed or _too_many(verdict)) and left >= 1):
            await self._refresh()
            verdict = await grade(self.environment, diff, check, max(1, min(seconds, left)))
        if _too_many(verdict):
            words = f"{verdict.changed} changes cannot be applied in the time that grading has"
            return verdict.model_copy(update={"grade": Grade.UNUSABLE, "detail": words})
        return verdict

    async def _refresh(self) -> None:
        await self.environment.stop(delete=True)
        await self.environment.start(force_build=False)


def _too_many(verdict: Verdict) -> bool:
    """With so many it is theirs that grading does not begin in time."""
    return verdict.grade is Grade.TIMEOUT and verdict.changed > policy.MANY


def _passed_before(verdict: Verdict) -> Verdict:
    """A failure after a success is worth a look: a flaky test, or code that answers by chance."""
    if verdict.grade is not Grade.FAILED:
        return verdict
    return verdict.model_copy(update={"signs": [f"the tests passed, but not again: {_last_line(verdict.detail)}"]})


def _last_line(detail: str) -> str:
    return detail.strip().rpartition("\n")[2]


async def grade(environment: TrialEnvironment, diff: list[Step], check: str, seconds: int) -> Verdict:
    """Grade in `environment`, which must be fresh."""
    nonce = secrets.token_hex(16).encode()
    work = marshal.dumps((diff, check, environment.workdir, seconds))
    payload = b"".join(len(part).to_bytes(8, "big") + part for part in (nonce, work))
    program = await asyncio.to_thread(INSIDE.read_text, encoding="utf-8")
    command = [interpreter(), "-I", "-S", "-B", "-c", program, str(environment.sandbox.uid)]
    try:
        result = await environment.sandbox.exec(command, user="root", stdin=payload, timeout_s=seconds + _margin(seconds))
    except SandboxLost as lost:
        if lost.outside:
            return Verdict(grade=Grade.NOT_RUN, detail=str(lost), changed=len(diff))
        verdict = read_verdict(lost.stdout, -9, nonce, len(diff), str(lost))
    except SandboxError as error:
        return Verdict(grade=Grade.NOT_RUN, detail=str(error), changed=len(diff))
    else:
        exit_code = None if result.timed_out else result.return_code
        verdict = read_verdict(result.stdout, exit_code, nonce, len(diff), result.stderr.decode(errors="replace"))
    if verdict.grade is Grade.NOT_RUN and diff:
        verdict = await _blame(environment, verdict)
    return verdict


def share(left: float, runs: int, seconds: int) -> int:
    """Seconds of the check for the next of `runs` that have `left` seconds together; `seconds` is what the first one had."""
    return max(1, int(left / runs - _margin(seconds)))


def _margin(seconds: int) -> float:
    """From the end of the check's time to the end of the command that runs it."""
    return min(5.0, seconds / 2)


async def _blame(environment: TrialEnvironment, verdict: Verdict) -> Verdict:
    """What did not begin because the agent's changes are too much for the sandbox's limits is the agent's doing."""
    try:
        environment.usage = await environment.sandbox.usage()
    except SandboxError:
        return verdict
    if not environment.fault:
        return verdict
    return verdict.model_copy(update={"grade": Grade.UNUSABLE, "detail": f"the agent's changes cannot be applied: {environment.fault}"})
