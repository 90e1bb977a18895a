"""How a run ended, from the facts. What the trainer says about itself is not one of them, except where its exit code was lost."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from ..schemas.rundir import ExitFile
from ..schemas.states import RunState
from ..security import redact

LOG_BYTES = 8 * 2**20
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\([\w .:=-]*pid=\d+[^)]*\)\s?")
_ERROR = re.compile(r"^(?=\S)(?!.*\b(?:0|no) errors?\b)(?:.*\b(?:ERROR|FATAL|CRITICAL|\w*Error|\w*Exception)\b[]: ].*\S.*)$")


@dataclass(frozen=True, slots=True)
class Conclusion:
    state: RunState
    reason: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """`exit` None: the supervisor died and took the exit codes with it."""

    exit: ExitFile | None
    stop_requested: bool
    reported: str
    steps_done: int
    steps_expected: int
    final_evaluation: bool
    first_error: str


def conclude(facts: Facts) -> Conclusion:
    """`succeeded` needs exit code 0, every step and the final evaluation; a run that was stopped early is `stopped`."""
    exit = facts.exit
    if exit.stopped if exit else facts.stop_requested:
        return Conclusion(RunState.STOPPED, "stopped by request")
    clean = exit.trainer == 0 if exit else facts.reported.startswith(RunState.SUCCEEDED)
    short = facts.steps_done < facts.steps_expected
    if clean and not short and facts.final_evaluation:
        return Conclusion(RunState.SUCCEEDED, "")
    if not clean:
        reason = exit.reason if exit and exit.reason else _ended(exit)
    elif short:
        reason = f"the trainer ended without an error after {facts.steps_done} of {facts.steps_expected} steps"
    else:
        reason = "the trainer ended without the held-out evaluation after the last step"
    said = facts.reported.removeprefix(f"{RunState.FAILED}: ") if facts.reported.startswith(RunState.FAILED) else ""
    first = facts.first_error if facts.first_error not in said else ""
    detail = "; first error in its log: ".join(filter(None, (said, first))) or "its log names no error"
    # A reason of the supervisor's own is not the trainer's doing.
    problem = redact(reason) if exit and exit.reason else f"{reason}: {detail} (trainer.log)"
    return Conclusion(RunState.FAILED, reason, problem)


def first_error(log: Path) -> str:
    """The first error of a log, in one line: the exception of the first traceback, else the first line that calls itself an error.

    The last lines of a training log are mostly consequences.
    """
    try:
        with log.open("rb") as file:
            lines = [_DECORATION.sub("", line.rstrip()) for line in file.read(LOG_BYTES).decode(errors="replace").splitlines()]
    except OSError:
        return ""
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            exception = next((later for later in lines[number + 1 :] if later and not later[0].isspace()), "")
            return redact(exception)[:500]
    return redact(next((line for line in lines if _ERROR.match(line)), ""))[:500]


def _ended(exit: ExitFile | None) -> str:
    if exit is None or exit.trainer is None:
        return "the trainer's processes are gone and nothing says how they ended"
    if exit.trainer < 0:
        name = signal.Signals(-exit.trainer).name
        return f"the trainer was ended by {name}{', perhaps for want of memory' if name == 'SIGKILL' else ''}"
    return f"the trainer ended with exit code {exit.trainer}"
