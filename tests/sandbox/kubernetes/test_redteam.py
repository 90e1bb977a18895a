"""Attacks that a pod has to withstand by other means than a namespace: what graded code does to the container that it is graded in."""

from __future__ import annotations

import asyncio
import os

import pytest

from sandbox.redteam.play import chosen, holes, play
from tests.sandbox.environments.fake_kubernetes import NAMESPACE
from tests.sandbox.environments.kubernetes_room import IMAGE, fake_cluster, settings_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


def test_what_breaks_the_graders_pod_earns_nothing_and_fails_nothing() -> None:
    async def main() -> None:
        async with fake_cluster() as (fake, _):
            settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE).model_dump(mode="json")
            section = {name: settings[name] for name in ("environment", "image", "kubernetes")}
            attacks = [exploit for exploit in chosen("being-graded") if exploit.name.startswith(("fills-memory", "forks-", "kills-all"))]
            rows = await play(attacks, section)
            assert len(rows) == 3
            assert holes(rows) == []
            assert [row["reward"] for row in rows] == [0, 0, 0]

    asyncio.run(main())
