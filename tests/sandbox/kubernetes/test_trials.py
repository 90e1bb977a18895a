"""Whole trials in pods: an unmodified harness solves a task through its gate, and grading in a fresh pod holds."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from sandbox.harnesses.pins import MINI_SWE_AGENT
from sandbox.harnesses.stage import Played, stage
from sandbox.harnesses.verify import repair_voice, task
from sandbox.runner.selftest import selftest
from server.schemas.outcome import Scored
from server.schemas.runspec import RunSpec
from tests.sandbox.environments.fake_kubernetes import NAMESPACE
from tests.sandbox.environments.kubernetes_room import IMAGE, fake_cluster, missing, real_settings, settings_for
from tests.sandbox.harnesses.support import pinned, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
on_fake = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
on_cluster = pytest.mark.skipif(bool(missing("cluster")), reason=missing("cluster"))


async def solved(section: dict[str, Any]) -> Played:
    name = MINI_SWE_AGENT.name
    async with stage([pinned(name)], store(name), sandbox=section) as room:
        return await room.play(name, [repair_voice(name, task())])


def judge(played: Played) -> None:
    assert isinstance(played.outcome, Scored), played.outcome
    assert (played.outcome.reward, played.outcome.detail, played.exit_code, len(played.end.record.turns)) == (1, "", 0, 5)
    assert played.cpu_s > 0.1


async def graded(section: dict[str, Any]) -> None:
    spec = RunSpec.model_validate(
        {
            "model": {"path": "builtin:none"},
            "harnesses": [{"name": MINI_SWE_AGENT.name, "version": MINI_SWE_AGENT.version}],
            "data": {"family": "onebug", "train_tasks": 1, "held_out_tasks": 1},
            "sandbox": section,
        }
    )
    facts = await selftest(spec, 1)
    assert facts.problems == []
    assert [row.reward for row in facts.oracle] == [1, 1]
    assert [row.reward for row in facts.noop] == [0, 0]
    assert facts.limits_mode == "cgroup"


@on_fake
def test_mini_swe_agent_solves_a_task_in_a_pod() -> None:
    async def main() -> None:
        async with fake_cluster() as (fake, _):
            judge(await solved(settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE).model_dump(mode="json")))
            assert (fake.pods, fake.policies) == ({}, {})

    asyncio.run(main())


@on_fake
def test_the_grader_tells_solutions_from_cheats_in_pods() -> None:
    async def main() -> None:
        async with fake_cluster() as (fake, _):
            await graded(settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE).model_dump(mode="json"))

    asyncio.run(main())


@on_cluster
def test_mini_swe_agent_solves_a_task_on_a_real_cluster() -> None:
    judge(asyncio.run(solved(real_settings().model_dump(mode="json"))))


@on_cluster
def test_the_grader_tells_solutions_from_cheats_on_a_real_cluster() -> None:
    asyncio.run(graded(real_settings().model_dump(mode="json")))
