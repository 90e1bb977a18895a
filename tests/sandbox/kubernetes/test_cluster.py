"""The backend over a fake API server whose pods are real: what is busy, what breaks, what is left, and what gets out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.environments.errors import ImageError, SandboxError, SandboxLost
from sandbox.environments.kubernetes.backend import Kubernetes
from sandbox.environments.kubernetes.pulling import pull_all
from sandbox.environments.spec import RoMount, SandboxSpec
from server.schemas.runspec import Limits
from tests.sandbox.environments.fake_kubernetes import NAMESPACE, FakeCluster, Image
from tests.sandbox.environments.kubernetes_room import IMAGE, KubernetesRoom, fake_cluster, settings_for
from tests.sandbox.environments.test_contract import processes, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
LIMITS = Limits(memory_mb=128, processes=32, cpu_s=20, disk_mb=16, output_kb=64)
SPEC = SandboxSpec(limits=LIMITS)


@pytest.fixture
def run(kubernetes_room: KubernetesRoom) -> Callable[[Callable[[Kubernetes, FakeCluster], Awaitable[None]]], None]:
    """Runs a body with the module's backend and its cluster."""
    assert kubernetes_room.fake is not None
    fake = kubernetes_room.fake
    return lambda body: kubernetes_room.runner.run(_drive(body(kubernetes_room.host, fake)))


async def _drive(work: Awaitable[None]) -> None:
    await work


async def gone(fake: FakeCluster) -> None:
    async with asyncio.timeout(60):
        while fake.pods:
            await asyncio.sleep(0.05)


Run = Callable[[Callable[[Kubernetes, FakeCluster], Awaitable[None]]], None]


# ---------------------------------------------------------------- a server that is busy or forgets


def test_a_busy_server_is_asked_again(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        fake.faults.answers.extend([("POST", 429, {"Retry-After": "0"}), ("POST", 500, {}), ("POST", 503, {})])
        sandbox = await backend.create(SPEC)
        fake.faults.answers.extend([("GET", 500, {}), ("GET", 429, {}), ("GET", 404, {})])
        assert (await sandbox.exec("echo works")).stdout == b"works\n"
        fake.faults.answers.append(("DELETE", 503, {}))
        await sandbox.destroy()
        await gone(fake)

    run(body)


def test_a_creation_whose_answer_was_lost_is_one_creation(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        await gone(fake)
        fake.faults.drop_creations = 1
        sandbox = await backend.create(SPEC)
        assert list(fake.pods) == [sandbox.name]
        await sandbox.destroy()

    run(body)


def test_what_is_refused_is_not_asked_again(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        for status, words in ((403, "give the runner's account the rights"), (422, "answers 422")):
            before = len([line for line in fake.requests if line.startswith("POST")])
            fake.faults.answers.append(("POST", status, {}))
            with pytest.raises(SandboxError, match=words):
                await backend.create(SPEC)
            assert len([line for line in fake.requests if line.startswith("POST")]) == before + 1

    run(body)


def test_a_watch_that_is_too_old_is_begun_anew(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        fake.faults.forget_events = True
        backend._cluster.pods._task.cancel()  # type: ignore[union-attr]  # as when its connection ends
        with contextlib.suppress(asyncio.CancelledError):
            await backend._cluster.pods._task  # type: ignore[misc]
        await backend._cluster.pods.start()
        sandbox = await backend.create(SPEC)
        assert not fake.faults.forget_events
        assert (await sandbox.exec("echo works")).stdout == b"works\n"
        await sandbox.destroy()

    run(body)


# ---------------------------------------------------------------- execs and pods that end otherwise


def test_nothing_runs_after_a_kill_though_nobody_answered_at_first(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        sandbox = await backend.create(SPEC)
        await sandbox.exec("sleep 4724.25 & true")
        fake.faults.away = True
        fake.cut()
        killing = asyncio.create_task(sandbox.kill())
        await asyncio.sleep(3)
        assert processes("sleep 4724.25") and not killing.done()
        fake.faults.away = False
        await killing
        assert not processes("sleep 4724.25")
        assert await sandbox.changes() == []
        await sandbox.destroy()

    run(body)


def test_a_pod_that_somebody_deletes_is_lost_before_it_is_gone(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        sandbox = await backend.create(SPEC)
        pod = fake.pods[sandbox.name]
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        fake.store.put("pods", pod, "MODIFIED")
        with pytest.raises(SandboxLost, match="somebody deletes it") as lost:
            async with asyncio.timeout(30):
                while True:
                    await sandbox.exec("true")
        assert lost.value.outside
        del pod["metadata"]["deletionTimestamp"]
        await sandbox.destroy()

    run(body)


def test_an_end_that_nobody_reported_is_an_error(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        sandbox = await backend.create(SPEC)
        fake.faults.drop_execs = 1
        with pytest.raises(SandboxError, match="nobody said how the command ended"):
            await sandbox.exec("echo out; exit 0")
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        await sandbox.destroy()

    run(body)


@pytest.mark.parametrize("own", [True, False])
def test_an_eviction_for_its_own_disk_is_the_agents_and_another_is_not(run: Run, own: bool) -> None:
    messages = {
        True: "Pod ephemeral local storage usage exceeds the total limit of containers 16Mi. ",
        False: "The node was low on resource: memory. ",
    }

    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        sandbox = await backend.create(SPEC)
        running = asyncio.create_task(sandbox.exec("echo begun; sleep 4723.25"))
        await until(lambda: processes("sleep 4723.25"))
        await asyncio.sleep(1)  # what it said is on its way through this loop
        await fake.node.fail(sandbox.name, "Evicted", messages[own])
        with pytest.raises(SandboxLost, match="Evicted") as lost:
            await running
        assert lost.value.stdout == b"begun\n"
        await sandbox.kill()
        report = await sandbox.usage()
        assert (report.running, report.disk_full) == (False, own)
        with pytest.raises(SandboxError) as collecting:
            await sandbox.changes()
        assert isinstance(collecting.value, SandboxLost) is not own
        await sandbox.destroy()

    run(body)


def test_a_container_out_of_memory_is_the_agents_own(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        sandbox = await backend.create(SPEC)
        await fake.node.fail(sandbox.name, "", "", {"reason": "OOMKilled", "exitCode": 137})
        with pytest.raises(SandboxLost, match="out of memory"):
            await sandbox.exec("true")
        await sandbox.kill()
        assert (await sandbox.usage()).out_of_memory == 1
        await sandbox.destroy()

    run(body)


def test_a_pod_whose_time_is_over_says_so(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        sandbox = await backend.create(SPEC)
        await fake.node.fail(sandbox.name, "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
        with pytest.raises(SandboxLost, match="DeadlineExceeded"):
            await sandbox.exec("true")
        await sandbox.destroy()

    run(body)


def test_a_missing_image_is_an_image_error_and_leaves_nothing(run: Run) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        with pytest.raises(ImageError, match="no-such-image:1"):
            await backend.create(SandboxSpec(limits=LIMITS, image="no-such-image:1"))
        await gone(fake)

    run(body)


# ---------------------------------------------------------------- what gets out


def test_no_secret_is_in_an_address_or_a_log(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        sandbox = await backend.create(SPEC)
        fake.faults.answers.append(("GET", 401, {}))
        with pytest.raises(SandboxError) as refused:
            await sandbox.exec("true")
        result = await sandbox.exec("echo $KEY", env={"KEY": "sk-of-the-rollout"}, stdin=b"sk-typed")
        assert result.stdout == b"sk-of-the-rollout\n"
        for secret in (fake.token, "sk-of-the-rollout", "sk-typed"):
            assert not any(secret in line for line in fake.requests)
            assert secret not in caplog.text + str(refused.value)
        await sandbox.destroy()

    with caplog.at_level(logging.DEBUG):
        run(body)


def test_a_cluster_without_a_policy_engine_is_refused() -> None:
    async def main() -> None:
        async with fake_cluster(enforce=False) as (fake, root):
            with pytest.raises(SandboxError, match="does not enforce network policies"):
                async with Kubernetes.open(root / "base", settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE)):
                    pass
            assert (fake.pods, fake.policies) == ({}, {})

    asyncio.run(main())


def test_a_node_that_leaves_no_room_for_our_own_processes_is_refused() -> None:
    async def main() -> None:
        async with fake_cluster() as (fake, root):
            fake.node.pids = 100
            with pytest.raises(SandboxError, match=r"room for \d\d processes, .* need 160: .*podPidsLimit"):
                async with Kubernetes.open(root / "base", settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE)):
                    pass

    asyncio.run(main())


def test_a_cluster_that_enforces_is_proven_and_left_clean(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_cluster() as (fake, root):
            settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE)
            async with Kubernetes.open(root / "base", settings) as backend:
                assert backend.label == "kubernetes/v1.33.0-fake"
                assert list(fake.policies) == [f"lego-{backend._cluster.owner.name}-deny"]
                await gone(fake)
            assert (fake.pods, fake.policies) == ({}, {})

    asyncio.run(main())


def test_what_stands_in_the_way_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "no-such-file", IMAGE, ttl_s=60)
    found = " ".join(Kubernetes.problems(settings))
    assert f"there is no file {tmp_path}/no-such-file" in found
    assert "pods end after 60 s, but sandbox.budgets allow a trial 720 s" in found


def test_a_kubeconfig_that_is_none_is_refused_without_its_content(tmp_path: Path) -> None:
    async def main(text: str) -> str:
        (tmp_path / "config").write_text(text)
        with pytest.raises(SandboxError, match="no way into a cluster") as refused:
            await Kubernetes.start(tmp_path / "base", settings_for(tmp_path / "config", IMAGE))
        return str(refused.value)

    for text in ("users: [{name: x, user: {token: sk-secret}}]\n", "token: sk-secret: {", "sk-secret"):
        assert "sk-secret" not in asyncio.run(main(text))


# ---------------------------------------------------------------- what is left


def test_what_a_dead_runner_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_cluster() as (fake, root):
            settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE)
            async with (
                Kubernetes.open(root / "a", settings, prove=False) as first,
                Kubernetes.open(root / "b", settings, prove=False) as other,
            ):
                await first.create(SPEC)
                kept = await other.create(SPEC)
                with pytest.raises(SandboxError, match="belongs to a runner that is running"):
                    await Kubernetes.start(root / "a", settings, prove=False)
                assert await asyncio.to_thread(Kubernetes.sweep, root / "a") == []  # it lives
                os.close(first._record)  # as when it is killed: nobody cleans up, and the lock is gone
                swept = await asyncio.to_thread(Kubernetes.sweep, root / "a")
                assert len([name for name in swept if name.startswith("pods/")]) == 1
                assert list(fake.pods) == [kept.name]
                assert await asyncio.to_thread(Kubernetes.sweep, root / "a") == []
                (root / "away").mkdir()
                (root / "away" / "kubernetes.json").write_text(settings_for(root / "no-such-file", IMAGE).model_dump_json())
                assert await asyncio.to_thread(Kubernetes.sweep, root / "away") == []
                assert (root / "away" / "kubernetes.json").exists()
                first._record = os.open(os.devnull, os.O_RDONLY)

    asyncio.run(main())


def test_pods_of_others_go_when_their_time_is_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_cluster() as (fake, root):
            settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE)
            async with Kubernetes.open(root / "a", settings, prove=False) as gone:
                old, young = await gone.create(SPEC), await gone.create(SPEC)
                fake.pods[old.name]["metadata"]["annotations"]["lego-rl/expires"] = str(int(time.time()) - 1)
                async with Kubernetes.open(root / "b", settings, prove=False):
                    async with asyncio.timeout(60):
                        while list(fake.pods) != [young.name]:
                            await asyncio.sleep(0.1)

    asyncio.run(main())


# ---------------------------------------------------------------- images and runtimes


def test_a_tree_is_copied_out_of_an_image(run: Run, tmp_path: Path) -> None:
    async def body(backend: Kubernetes, fake: FakeCluster) -> None:
        await backend.copy_out(IMAGE, "/etc/ssl", tmp_path / "tree")
        assert (tmp_path / "tree" / "openssl.cnf").is_file()
        with pytest.raises(SandboxError, match="cannot download /nowhere"):
            await backend.copy_out(IMAGE, "/nowhere", tmp_path / "other")

    run(body)


def test_images_are_pulled_ahead_a_few_at_a_time() -> None:
    async def main() -> None:
        images = {f"task:{number}": Image(pull_s=0.2) for number in range(4)}
        async with fake_cluster(**images) as (fake, root):
            settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE, pulls=2)
            async with Kubernetes.open(root / "base", settings, prove=False) as backend:
                assert await backend.fetch({"task:0": None}) == {}
                assert fake.node.pulled == []  # nobody asked for it
                failures = await pull_all(backend._cluster, [*images, "no-such:1", "task:0"])
                assert sorted(fake.node.pulled) == sorted(images)
                assert fake.node.most_pulling == 2
                assert list(failures) == ["no-such:1"]
                await gone(fake)
            settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE, prepull=True, pulls=4, pull_pause_s=0.4)
            async with Kubernetes.open(root / "paced", settings, prove=False) as backend:
                begun = time.monotonic()
                assert await backend.fetch(dict.fromkeys(images)) == {}
                assert time.monotonic() - begun >= 4 * 0.4  # a sleep may be longer, and never shorter

    asyncio.run(main())


@pytest.mark.parametrize("via", ["init_container", "image_volume"])
def test_a_runtime_comes_from_an_image_and_a_tasks_files_are_sent(via: str, tmp_path: Path) -> None:
    """The fake's pods have the interpreter of this machine anyway; the tool and the history show how either comes."""
    tool = tmp_path / "tool"
    (tmp_path / "image" / str(tool).lstrip("/")).mkdir(parents=True)
    (tmp_path / "image" / str(tool).lstrip("/") / "main.py").write_text("print('from the image')")
    tool.mkdir()
    history = tmp_path / "history"
    history.mkdir()
    (history / "HEAD").write_text("ref: refs/heads/main\n")
    tree = tmp_path / "tree"
    (tree / ".git").mkdir(parents=True)
    (tree / ".git" / "HEAD").write_text("one commit\n")
    (tree / "a.py").write_text("x")

    async def main() -> None:
        async with fake_cluster(**{"tools:1": Image(files=tmp_path / "image")}) as (fake, root):
            more: dict[str, Any] = {"runtime": {"via": via, "image": "tools:1"}}
            settings = settings_for(fake.kubeconfig, IMAGE, namespace=NAMESPACE, **more)
            async with Kubernetes.open(root / "base", settings, prove=False) as backend:
                mounts = (RoMount(tool), RoMount(history, "/workspace/.git"))
                sandbox = await backend.create(SandboxSpec(limits=LIMITS, workspace=tree, mounts=mounts))
                result = await sandbox.exec(f"python3 {tool}/main.py; cat .git/HEAD; touch .git/x || touch {tool}/x; ls")
                assert result.stdout == b"from the image\nref: refs/heads/main\na.py\n"
                assert result.stderr.count(b"denied") + result.stderr.count(b"Read-only") == 2
                await sandbox.exec("echo y > a.py")
                await sandbox.kill()
                assert [change.path for change in await sandbox.changes()] == ["a.py"]

    asyncio.run(main())
