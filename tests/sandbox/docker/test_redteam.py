"""Attacks of every kind from inside containers of a real engine. All of them: `rl redteam --in FILE`."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.redteam.play import controls, holes, play
from tests.sandbox.environments.docker_engine import TestEngine, settings_for
from tests.sandbox.redteam.test_redteam import named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ATTACKS = {
    *("writes-rewards-while-being-graded", "stops-the-checker-while-being-graded", "change-larger-than-the-disk", "tree-too-deep"),
    *("services-of-the-host-by-unix-socket", "through-the-gate-to-elsewhere", "history-lost-objects", "processes-without-end"),
}


def test_no_attack_earns_a_reward_in_a_container_and_honest_work_does(docker_engine: TestEngine) -> None:
    chosen = [*named(ATTACKS), *controls()]
    section = settings_for(docker_engine).model_dump(mode="json", exclude={"limits", "budgets", "concurrency"})
    rows = asyncio.run(play(chosen, section))
    assert holes(rows) == []
    assert [row["exploit"] for row in rows if not row["detected"] and row["exploit"] in ATTACKS] == []
    assert [row["exploit"] for row in rows if row["detected"] and row["honest"]] == []
    assert {row["environment"] for row in rows} == {rows[0]["environment"]}
    assert rows[0]["environment"].startswith("docker/")
