"""Grading that does not begin in time: whose doing that is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandbox.integrity import grade, policy
from sandbox.integrity.verdict import Grade, Verdict
from sandbox.runner.drive import Room
from sandbox.runner.outcomes import decide
from server.schemas.outcome import Cause, Failed, Scored, Termination
from tests.sandbox.support import needs_sandbox, play, script_room


@needs_sandbox
def test_only_changes_without_number_make_it_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent with thousands of files turned its zero into a time-out of the verifier, in containers on a busy machine."""
    changed: list[int] = []

    async def slow(environment: Any, diff: list[Any], check: str, seconds: int) -> Verdict:
        return Verdict(grade=Grade.TIMEOUT, detail="the grader did not begin in time", changed=changed[0])

    async def main(room: Room) -> Scored | Failed:
        return decide((await play(room, "true", trial_id=f"t{changed[0]}"))[0])

    async def both() -> tuple[Scored | Failed, Scored | Failed]:
        async with script_room() as room:
            changed[:] = [policy.MANY]
            few = await main(room)
            changed[:] = [policy.MANY + 1]
            return few, await main(room)

    monkeypatch.setattr(grade, "grade", slow)
    few, many = asyncio.run(both())
    assert isinstance(few, Failed) and few.cause is Cause.VERIFIER_TIMEOUT
    assert isinstance(many, Scored) and (many.reward, many.termination) == (0, Termination.AGENT_FAULT)
    assert many.detail == "5001 changes cannot be applied in the time that grading has"


def test_changes_without_number_are_worth_a_look() -> None:
    """In containers 80,000 empty files were graded without a word."""
    changes = [("file", f"f{number}", 0o644, b"") for number in range(policy.MANY + 1)]
    assert policy.suspicious(changes[1:]) == []
    assert policy.suspicious(changes) == ["5001 files, directories and links changed"]
