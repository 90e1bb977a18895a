"""What a cluster does to a running trial ends as the admission table says: what the agent did is graded, everything else fails unscored."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox.environments.backend import Backend
from sandbox.environments.kubernetes import sandbox as sandboxes
from sandbox.environments.kubernetes.manifest import ROLE
from sandbox.environments.spec import SandboxSpec
from sandbox.runner.drive import Room
from server.schemas.outcome import Cause, Failed, Scored
from tests.sandbox.environments.fake_kubernetes import NAMESPACE, FakeCluster
from tests.sandbox.environments.kubernetes_room import IMAGE, fake_cluster, settings_for
from tests.sandbox.environments.test_contract import processes, until
from tests.sandbox.support import script_room, spec

from .trials import MARK, Meanwhile, lost, own_fault, play, solved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]
LIMITS = {"memory_mb": 128, "processes": 32, "cpu_s": 20, "disk_mb": 16}


@dataclass
class Site:
    """A room whose sandboxes are pods of a fake cluster, and the loop that both live in."""

    runner: asyncio.Runner
    room: Room
    fake: FakeCluster
    played: int = 0

    def play(self, script: str, meanwhile: Meanwhile) -> Scored | Failed:
        async def to_the_end() -> Scored | Failed:
            outcome = await play(self.room, f"t{self.played}", script, meanwhile)
            await self.empty()
            return outcome

        self.played += 1
        return self.runner.run(to_the_end())

    async def empty(self) -> None:
        async with asyncio.timeout(120):
            while self.fake.pods:
                await asyncio.sleep(0.05)

    async def begun(self) -> str:
        """The name of the agent's pod once its command runs."""
        await until(lambda: processes(f"sleep {MARK}"))
        return self.running("agent")[0]

    def running(self, role: str) -> list[str]:
        pods = [name for name, pod in self.fake.pods.items() if pod["metadata"]["labels"][ROLE] == role]
        return [name for name in pods if self.fake.node.can_enter(name)]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with asyncio.Runner() as runner:
        cluster = fake_cluster()
        fake, _ = runner.run(cluster.__aenter__())
        settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE).model_dump(mode="json")
        section = {name: settings[name] for name in ("environment", "image", "kubernetes")}
        opening = script_room(spec(sandbox=section | {"limits": LIMITS}))
        room = runner.run(opening.__aenter__())
        yield Site(runner, room, fake)
        runner.run(opening.__aexit__(None, None, None))
        runner.run(cluster.__aexit__(None, None, None))


# ---------------------------------------------------------------- the agent's pod ends


def test_a_pod_that_somebody_deletes_is_a_lost_trial(site: Site) -> None:
    async def delete(_: object) -> None:
        name = await site.begun()
        await site.fake._remove("pods", site.fake.pods[name], None)

    lost(site.play(f"sleep {MARK}", delete), "delete")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Evicted", "The node was low on resource: memory. Container main was using 90Mi, which exceeds its request of 64Mi. "),
        ("NodeLost", "Node node-1 which was running pod is unresponsive"),
        ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline"),
    ],
)
def test_a_pod_that_its_node_ends_is_a_lost_trial(site: Site, reason: str, message: str) -> None:
    async def end(_: object) -> None:
        await site.fake.node.fail(await site.begun(), reason, message)

    lost(site.play(f"sleep {MARK}", end), reason)


def test_a_pod_that_its_agent_ended_is_scored_zero(site: Site) -> None:
    async def fill(_: object) -> None:
        message = "Pod ephemeral local storage usage exceeds the total limit of containers 16Mi. "
        await site.fake.node.fail(await site.begun(), "Evicted", message)

    async def use_all_memory(_: object) -> None:
        await site.fake.node.fail(await site.begun(), "", "", {"reason": "OOMKilled", "exitCode": 137})

    own_fault(site.play(f"sleep {MARK}", fill), "exceeds the total limit")
    own_fault(site.play(f"sleep {MARK}", use_all_memory), "out of memory")


def test_a_node_too_slow_to_read_what_is_left_is_a_lost_trial(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as a tree that the agent broke."""

    async def slow_down(_: object) -> None:
        monkeypatch.setattr(sandboxes, "_TRANSFER_S", 0)

    lost(site.play("sleep 1", slow_down), "took longer than")


# ---------------------------------------------------------------- the way to it breaks


def test_an_exec_that_is_cut_is_a_lost_trial_and_its_agent_is_ended(site: Site) -> None:
    async def cut(_: object) -> None:
        await site.begun()
        assert site.fake.cut("/exec") >= 1

    lost(site.play(f"sleep {MARK}", cut), "nobody said how the command ended")


def test_an_api_server_that_goes_away_in_mid_exec_is_a_lost_trial(site: Site) -> None:
    async def go_away(_: object) -> None:
        await site.begun()
        site.fake.faults.away = True
        site.fake.cut()
        await asyncio.sleep(3)
        site.fake.faults.away = False

    lost(site.play(f"sleep {MARK}", go_away))


def test_a_watch_that_is_cut_is_nobodys_concern(site: Site) -> None:
    async def cut(_: object) -> None:
        await site.begun()
        for _ in range(3):
            assert site.fake.cut("watch=true") == 1
            await until(lambda: any("watch=true" in path for path in site.fake.open.values()))

    solved(site.play(f"timeout 2 sleep {MARK}", cut))


def test_a_server_that_is_busy_now_and_then_costs_no_trial(site: Site) -> None:
    async def answer(_: object) -> None:
        await site.begun()
        busy = [(method, status) for status in (409, 429, 500, 503) for method in ("GET", "POST", "DELETE")]
        site.fake.faults.answers.extend((method, status, {"Retry-After": "0"}) for method, status in busy)

    solved(site.play(f"timeout 1 sleep {MARK}", answer))
    site.fake.faults.answers.clear()


# ---------------------------------------------------------------- the verifier's pod ends


def test_a_verifiers_pod_that_goes_is_made_again_and_never_scored(site: Site) -> None:
    async def evict(trial: asyncio.Task[Any], most: int) -> None:
        evicted = 0
        while not trial.done() and evicted < most:
            for name in site.running("verifier")[: most - evicted]:
                await site.fake.node.fail(name, "Evicted", "The node was low on resource: memory. ")
                evicted += 1
            await asyncio.sleep(0.01)
        assert evicted

    solved(site.play("true", lambda trial: evict(trial, 1)))
    lost(site.play("true", lambda trial: evict(trial, 100)), "Evicted", causes=(Cause.VERIFIER, Cause.RUNNER_LOST))


# ---------------------------------------------------------------- many at once


def test_64_pods_at_once_are_64_sandboxes_and_leave_nothing(site: Site) -> None:
    async def one(number: int) -> bytes:
        backend = Backend.running(site.room.sandboxes)
        assert backend is not None
        sandbox = await backend.create(SandboxSpec(limits=site.room.spec.sandbox.limits))
        try:
            return bytes((await sandbox.exec(f"echo {number}")).stdout)
        finally:
            await sandbox.destroy()

    async def all_of_them() -> list[bytes]:
        answers = await asyncio.gather(*(one(number) for number in range(64)))
        await site.empty()
        return answers

    assert site.runner.run(all_of_them()) == [f"{number}\n".encode() for number in range(64)]
    assert 1 < site.fake.node.most_starting <= site.room.spec.sandbox.kubernetes.starts
    assert [name for name in site.fake.policies if not name.endswith("-deny")] == []
