"""The verifier: applies the agent's diff to the pristine tree in the fresh sandbox and runs the task's check there.

What makes a reward trustworthy: the tree comes from the task, not from the agent's sandbox; nothing of the agent lives any more; the
check reaches the sandbox over a pipe when grading starts and never lies in its file system; the answer comes over a pipe that graded code
does not hold and must carry a nonce that graded code has not seen. See `inside.py` for the half that runs in the sandbox.
"""

from __future__ import annotations

import asyncio
import marshal
import secrets
from pathlib import Path

from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

from sandbox.environments.namespace.channel import SandboxError
from sandbox.harnesses.warm import interpreter
from sandbox.tasks.lean import full_task
from server.schemas.rundir import write_atomic

from .changes import Step
from .environment import TrialEnvironment
from .verdict import Grade, Verdict, read_verdict

CHECK = "check.py"
VERDICT_FILE = "verdict.json"
CHECK_SECONDS = 30
"""Wall clock for the check itself; graded code that takes longer has failed."""
_INSIDE = Path(__file__).with_name("inside.py")


class Grader(BaseVerifier):
    """Harbor verifier, import path `sandbox.integrity.grade:Grader`. Writes `verdict.json` beside Harbor's own verifier output."""

    environment: TrialEnvironment

    async def verify(self) -> VerifierResult:
        verdict = await self._grade_once()
        if verdict.grade is Grade.NOT_RUN:
            await self.environment.stop(delete=True)
            await self.environment.start(force_build=False)
            verdict = await self._grade_once()
        write_atomic(self.trial_paths.verifier_dir / VERDICT_FILE, verdict.model_dump_json())
        return VerifierResult(rewards={"reward": float(verdict.grade is Grade.PASSED)})

    async def _grade_once(self) -> Verdict:
        if self.environment.diff is None:
            return Verdict(grade=Grade.NOT_RUN, detail="the agent's diff did not arrive in the grading sandbox")
        check = (full_task(self.task.paths.task_dir) / "tests" / CHECK).read_text(encoding="utf-8")
        return await grade(self.environment, self.environment.diff, check)


async def grade(environment: TrialEnvironment, diff: list[Step], check: str) -> Verdict:
    """Grade in `environment`, which must be fresh."""
    nonce = secrets.token_hex(16).encode()
    work = marshal.dumps((diff, check, environment.workdir, CHECK_SECONDS))
    payload = b"".join(len(part).to_bytes(8, "big") + part for part in (nonce, work))
    program = await asyncio.to_thread(_INSIDE.read_text, encoding="utf-8")
    command = [interpreter(), "-I", "-S", "-B", "-c", program, str(environment.sandbox.uid)]
    try:
        result = await environment.sandbox.exec(command, user="root", stdin=payload, timeout_s=2 * CHECK_SECONDS)
    except SandboxError as error:
        return Verdict(grade=Grade.NOT_RUN, detail=str(error), changed=len(diff))
    exit_code = None if result.timed_out else result.return_code
    return read_verdict(result.stdout, exit_code, nonce, len(diff), result.stderr.decode(errors="replace"))
