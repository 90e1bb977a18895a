"""Whole trials in containers of a real engine: an unmodified harness solves a task, and grading there holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandbox.harnesses.pins import MINI_SWE_AGENT
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.verify import repair_voice, task
from sandbox.runner.selftest import selftest
from server.schemas.outcome import Scored
from server.schemas.runspec import RunSpec
from tests.sandbox.environments.docker_engine import IMAGE, TestEngine, settings_for
from tests.sandbox.harnesses.support import pinned, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def section(engine: TestEngine, **more: Any) -> dict[str, Any]:
    return {"environment": "docker", "image": IMAGE, "docker": {"url": engine.url} | more}


def test_mini_swe_agent_solves_a_task_in_a_container(docker_engine: TestEngine) -> None:
    name = MINI_SWE_AGENT.name

    async def one() -> Played:
        async with stage([pinned(name)], store(name), sandbox=section(docker_engine)) as room:
            return await room.play(name, [repair_voice(name, task())])

    played = asyncio.run(one())
    assert isinstance(played.outcome, Scored), played.outcome
    assert (played.outcome.reward, played.outcome.detail, played.exit_code, len(played.end.record.turns)) == (1, "", 0, 5)
    assert played.cpu_s > 0.1


def test_the_grader_tells_solutions_from_cheats_in_containers(docker_engine: TestEngine) -> None:
    spec = RunSpec.model_validate(
        {
            "model": {"path": "builtin:none"},
            "harnesses": [{"name": MINI_SWE_AGENT.name, "version": MINI_SWE_AGENT.version}],
            "data": {"family": "onebug", "train_tasks": 1, "held_out_tasks": 1},
            "sandbox": settings_for(docker_engine).model_dump(mode="json"),
        }
    )
    facts = asyncio.run(selftest(spec, 1))
    assert facts.problems == []
    assert [row.reward for row in facts.oracle] == [1, 1]
    assert [row.reward for row in facts.noop] == [0, 0]
    assert facts.limits_mode == "cgroup"
