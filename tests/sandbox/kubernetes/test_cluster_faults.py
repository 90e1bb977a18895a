"""The same on the real cluster of `make test-cluster`, whose programs are killed, frozen and started again under a trial."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.environments.backend import Backend
from sandbox.environments.kubernetes.api import Api
from sandbox.environments.kubernetes.manifest import OURS, ROLE
from sandbox.environments.spec import SandboxSpec
from sandbox.runner.drive import Room
from server.schemas.outcome import Failed, Scored, Termination
from server.schemas.runspec import Limits
from tests.cluster.node import MARK as CLUSTER
from tests.cluster.parts import Part
from tests.sandbox.environments.kubernetes_room import missing, real_settings
from tests.sandbox.environments.test_contract import processes, until
from tests.sandbox.support import script_room, spec

from .trials import MARK, Meanwhile, lost, own_fault, play, solved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing("cluster")), reason=missing("cluster")),
]
AWAY_S = 10
LIMITS = {"memory_mb": 128, "processes": 32, "cpu_s": 20, "disk_mb": 16}


@dataclass
class Site:
    """A room whose sandboxes are pods of the real cluster, and somebody else who may change what is in it."""

    runner: asyncio.Runner
    room: Room
    api: Api
    played: int = 0

    def play(self, script: str, meanwhile: Meanwhile) -> Scored | Failed:
        self.played += 1
        return self.runner.run(play(self.room, f"t{self.played}", script, meanwhile))

    async def begun(self) -> str:
        """The name of the agent's pod once its command runs."""
        await until(lambda: processes(f"sleep {MARK}"))
        pods = (await self.api.listing("pods", f"{OURS},{ROLE}=agent"))["items"]
        return str(next(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]))

    @property
    def backend(self) -> Backend:
        found = Backend.running(self.room.sandboxes)
        assert found is not None
        return found

    async def ready(self, ready: Callable[[dict[str, str]], bool] = lambda found: found["Ready"] == "True") -> None:
        """The node says so, of its conditions."""
        async with asyncio.timeout(120):
            while True:
                node = (await self.api.request("GET", "/api/v1/nodes"))["items"][0]
                tainted = [taint["key"] for taint in node["spec"].get("taints", [])]
                if ready({one["type"]: one["status"] for one in node["status"]["conditions"]}) and not tainted:
                    return
                await asyncio.sleep(0.5)


def part(name: str) -> Part:
    return Part(Path(os.environ[CLUSTER]).parent, name)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with opened() as found:
        yield found


@contextlib.contextmanager
def opened(**more: Any) -> Iterator[Site]:
    with asyncio.Runner() as runner:
        settings = real_settings()
        document = settings.model_dump(mode="json")
        section = {name: document[name] for name in ("environment", "image", "kubernetes")}
        section["kubernetes"] |= more
        opening = script_room(spec(sandbox=section | {"limits": LIMITS}))
        room = runner.run(opening.__aenter__())
        api = runner.run(Api.connect(settings.kubernetes, 8))
        yield Site(runner, room, api)
        runner.run(api.close())
        runner.run(opening.__aexit__(None, None, None))


def test_cluster_pod_that_somebody_deletes_is_a_lost_trial(site: Site) -> None:
    async def delete(grace_s: int | None) -> None:
        await site.api.delete("pods", await site.begun(), grace_s)

    lost(site.play(f"sleep {MARK}", lambda _: delete(None)), "delete")
    lost(site.play(f"sleep {MARK}", lambda _: delete(0)), "delete")


def test_cluster_api_server_that_dies_in_mid_exec_is_a_lost_trial(site: Site) -> None:
    async def die(_: object) -> None:
        await site.begun()
        server = part("kube-apiserver")
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(AWAY_S)
        server.start()

    lost(site.play(f"sleep {MARK}", die))
    solved(site.play("true", _nothing))


def test_cluster_api_server_that_hangs_costs_no_trial(site: Site) -> None:
    async def hang(_: object) -> None:
        await site.begun()
        server = part("kube-apiserver")
        server.freeze()
        await asyncio.sleep(AWAY_S)
        server.thaw()

    solved(site.play(f"timeout {AWAY_S // 2} sleep {MARK}", hang))


def test_cluster_kubelet_that_dies_in_mid_exec_is_a_lost_trial(site: Site) -> None:
    async def die(_: object) -> None:
        await site.begun()
        kubelet = part("kubelet")
        await asyncio.to_thread(kubelet.kill)
        await asyncio.sleep(AWAY_S / 2)
        kubelet.start()

    lost(site.play(f"sleep {MARK}", die))
    site.runner.run(site.ready())
    solved(site.play("true", _nothing))


def test_cluster_agent_is_killed_although_its_kubelet_was_away(site: Site) -> None:
    async def body() -> None:
        sandbox = await site.backend.create(SandboxSpec(limits=Limits(**LIMITS)))
        await sandbox.exec(f"echo x > new.txt; sleep {MARK} & true")
        kubelet = part("kubelet")
        await asyncio.to_thread(kubelet.kill)
        killing = asyncio.create_task(sandbox.kill())
        await asyncio.sleep(AWAY_S / 2)
        assert processes(f"sleep {MARK}") and not killing.done()
        kubelet.start()
        await killing
        assert not processes(f"sleep {MARK}")
        assert [change.path for change in await sandbox.changes()] == ["new.txt"]
        await sandbox.destroy()
        await site.ready()

    site.runner.run(body())


def test_cluster_agent_that_fills_its_memory_with_files_is_scored(site: Site) -> None:
    """Its scratch lies in memory: ending processes frees nothing, and even our own programs may not start."""
    fill = "for n in 1 2 3 4 5 6 7 8; do head -c 40000000 /dev/zero > /tmp/$n; done"
    outcome = site.play(f"{fill}; {fill}", _nothing)
    assert isinstance(outcome, Scored), outcome
    assert (outcome.termination, "memory" in outcome.detail) == (Termination.AGENT_FAULT, True), outcome


def test_cluster_agent_that_fills_its_disk_is_evicted_and_scored_zero() -> None:
    """On the container's own disk, where a kubelet looks every ten seconds, and ends the pod that has more than it may."""
    with opened(memory_volumes=False) as site:
        own_fault(site.play(f"head -c 100000000 /dev/zero > /tmp/full; sleep {MARK}", _nothing), "ephemeral local storage")


def test_cluster_node_in_need_evicts_and_the_trial_is_lost(site: Site) -> None:
    async def need(_: object) -> None:
        await site.begun()
        kubelet = part("kubelet")
        place = next(word for word in kubelet.argv if word.startswith("--config="))
        config = Path(place.removeprefix("--config="))
        greedy = json.loads(config.read_text()) | {
            "evictionHard": {"memory.available": "99%"},
            "evictionPressureTransitionPeriod": "1s",
        }
        other = config.with_name("kubelet-in-need.json")
        other.write_text(json.dumps(greedy))
        await asyncio.to_thread(kubelet.kill)
        kubelet.start([f"--config={other}" if word == place else word for word in kubelet.argv])

    async def relieve() -> None:
        kubelet = part("kubelet")
        await asyncio.to_thread(kubelet.kill)
        kubelet.start()
        await site.ready(lambda found: found["Ready"] == "True" and found["MemoryPressure"] == "False")

    try:
        lost(site.play(f"sleep {MARK}", need))
    finally:
        site.runner.run(relieve())
    solved(site.play("true", _nothing))


async def _nothing(_: Any) -> None: ...
