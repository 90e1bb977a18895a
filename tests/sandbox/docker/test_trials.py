"""Whole trials in containers of a real engine: an unmodified harness solves a task, and grading there holds."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from sandbox.harnesses.pins import MINI_SWE_AGENT
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.verify import repair_voice, task
from sandbox.runner.drive import Attempt
from sandbox.runner.outcomes import decide
from sandbox.runner.selftest import selftest
from server.schemas.outcome import ADMISSION, Cause, Failed, Fault, Scored, Stage
from server.schemas.runspec import RunSpec
from tests.sandbox.environments import docker_engine as docker
from tests.sandbox.environments.docker_engine import IMAGE, TestEngine, settings_for
from tests.sandbox.environments.test_contract import processes, until
from tests.sandbox.harnesses.support import pinned, store
from tests.sandbox.support import Stages, request, script_room, solution
from tests.sandbox.support import spec as room_spec

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


@pytest.mark.parametrize("stage_of_death", [Stage.AGENT, Stage.VERIFIER])
def test_an_engine_that_dies_under_a_trial_is_a_lost_trial_and_scores_nobody(stage_of_death: Stage) -> None:
    if reason := docker.missing():
        pytest.skip(reason)

    async def main(engine: TestEngine) -> Scored | Failed:
        async with script_room(room_spec(sandbox=section(engine))) as room:
            room.launchers["script"].script = solution(room) + ("; sleep 4733.25" if stage_of_death is Stage.AGENT else "")
            stages = Stages()
            trial = asyncio.create_task(Attempt(room, request(room, "t", "script"), "t", stages).run())
            await until(lambda: stage_of_death in stages.seen and (stage_of_death is Stage.VERIFIER or processes("sleep 4733.25")))
            os.kill(engine.pid, signal.SIGKILL)
            return decide(await trial)

    with docker.engine() as engine:
        outcome = asyncio.run(main(engine))
    assert isinstance(outcome, Failed), outcome
    assert outcome.cause in ((Cause.RUNNER_LOST,) if stage_of_death is Stage.AGENT else (Cause.RUNNER_LOST, Cause.VERIFIER)), outcome
    assert not ADMISSION[outcome.cause].trained and ADMISSION[outcome.cause].fault is not Fault.POLICY
    assert not processes("sleep 4733.25")
