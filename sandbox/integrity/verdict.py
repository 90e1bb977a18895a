"""What grading came to, and how the host reads it from the grader's verdict channel."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Grade(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TAMPERED = "tampered"
    """Grading began, graded code ran, and no whole verdict came out: killed, stopped or talked over by what it graded."""
    OPAQUE = "opaque"
    """Of one check only, never the last word: all is as it should be, except values that have no plain form to be judged by."""
    UNUSABLE = "unusable"
    """The agent's changes cannot be applied to the pristine tree: it left what no tree can hold within the limits."""
    NOT_RUN = "not_run"
    """Grading never began: the fault is on this side."""
    TIMEOUT = "timeout"
    """The deadline passed in a tree that the agent had not changed."""


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    grade: Grade
    detail: str = ""
    changed: int = 0
    """Entries of the tree that the agent changed."""
    killed: bool = False
    """A process of the grader got SIGKILL. Graded code can bring that about, and so can the machine: such a verdict is reached twice."""
    reverted: list[str] = Field(default_factory=list)
    """Paths of the agent's changes that were left out of grading, see `policy.py`."""
    signs: list[str] = Field(default_factory=list)
    """What the agent's changes look like, see `server.schemas.suspicion`."""


READY, UNUSABLE = b"ready\n", b"unusable "


def read_verdict(output: bytes, exit_code: int | None, nonce: bytes, changed: int, errors: str) -> Verdict:
    """`output` is all that came over the verdict channel; `exit_code` is None when the deadline passed.

    Whatever is not exactly the whole answer is no pass. Before `ready` no graded code had run, so the blame is ours.
    """
    if output == READY + b"passed " + nonce + b"\n" and exit_code == 0:
        return Verdict(grade=Grade.PASSED, changed=changed)
    if output == READY + b"failed\n" and exit_code == 0:
        return Verdict(grade=Grade.FAILED, changed=changed, detail=errors[-500:])
    if output == READY + b"opaque\n" and exit_code == 0:
        return Verdict(grade=Grade.OPAQUE, changed=changed, detail=errors[-500:])
    if output == READY + b"killed\n" and exit_code == 0 and changed:
        return Verdict(grade=Grade.FAILED, changed=changed, killed=True, detail=f"the check was killed: {errors[-500:]}")
    if output == READY + b"tampered\n" and exit_code == 0 and changed:
        return Verdict(grade=Grade.TAMPERED, changed=changed, detail=errors[-500:] or "graded code stopped the check")
    if output.startswith(UNUSABLE):
        return Verdict(grade=Grade.UNUSABLE, changed=changed, detail=output.removeprefix(UNUSABLE).decode(errors="replace"))
    if not output.startswith(READY):
        what = "the grader did not begin in time" if exit_code is None else f"the grader did not begin (exit {exit_code})"
        return Verdict(grade=Grade.TIMEOUT if exit_code is None else Grade.NOT_RUN, changed=changed, detail=f"{what}: {errors[-500:]}")
    if changed == 0:
        grade = Grade.TIMEOUT if exit_code is None else Grade.NOT_RUN
        return Verdict(grade=grade, detail=f"the check broke in the pristine tree (exit {exit_code}): {errors[-500:]}")
    detail = f"graded code ended the grader (exit {exit_code}) with {output[:80]!r}"
    return Verdict(grade=Grade.TAMPERED, changed=changed, killed=exit_code == -9, detail=detail)
