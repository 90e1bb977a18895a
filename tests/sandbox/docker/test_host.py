"""What is particular to containers: their engine, its images, what is left of dead owners, and what bounds them from outside."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.environments.docker import owner
from sandbox.environments.docker.container import EXPIRES, OWNER, creation
from sandbox.environments.docker.host import DockerHost
from sandbox.environments.errors import ImageError, SandboxError, SandboxLost
from sandbox.environments.spec import Directory, RoMount, SandboxSpec
from server.schemas.runspec import Limits
from tests.sandbox.environments import docker_engine as docker
from tests.sandbox.environments.docker_engine import IMAGE, DockerRoom, TestEngine, settings_for
from tests.sandbox.environments.test_contract import processes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = Limits(memory_mb=128, processes=32, cpu_s=20, disk_mb=4, output_kb=64)


@contextlib.asynccontextmanager
async def started(engine: TestEngine, **more: Any) -> AsyncIterator[DockerHost]:
    with tempfile.TemporaryDirectory(prefix="docker-host-") as base:
        async with DockerHost.open(Path(base), settings_for(engine, **more)) as host:
            yield host


def ours(engine: TestEngine, token: str | None = None) -> list[str]:
    """Containers and images of an owner, or of any."""
    api = docker.client(engine.url)
    label = {"label": OWNER if token is None else f"{OWNER}={token}"}
    found = [row["Id"] for row in [*api.containers(all=True, filters=label), *api.images(all=True, filters=label)]]
    api.close()
    return sorted(found)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def spec(**more: Any) -> SandboxSpec:
    return SandboxSpec(**{"image": IMAGE, "limits": SMALL} | more)


# ---------------------------------------------------------------- bounded from outside


def test_a_disk_that_fills_ends_the_container_and_is_the_agents_own(docker_room: DockerRoom) -> None:
    async def main() -> None:
        sandbox = await docker_room.host.create(spec())
        with pytest.raises(SandboxLost):
            await sandbox.exec("echo kept > note; i=0; while head -c 1000000 /dev/zero > f$i; do i=$((i+1)); done", timeout_s=60)
        await sandbox.kill()
        usage = await sandbox.usage()
        assert (usage.disk_full, usage.running) == (True, False)
        assert usage.disk_used > SMALL.disk_mb << 20
        with pytest.raises(SandboxError, match="larger than"):
            await sandbox.changes(1 << 20)
        await sandbox.destroy()

    docker_room.runner.run(main())


def test_an_agent_that_kills_all_it_can_only_kills_its_own_command(docker_room: DockerRoom) -> None:
    async def main() -> None:
        sandbox = await docker_room.host.create(spec())
        url = await sandbox.open_gate("127.0.0.1", 9)
        assert (await sandbox.exec("echo before; kill -9 -1")).return_code == -9
        assert (await sandbox.exec("echo after")).stdout == b"after\n"
        assert (await sandbox.exec(f"exec 3<> /dev/tcp/127.0.0.1/{url.rsplit(':')[-1]} && echo connected")).stdout == b"connected\n"
        await sandbox.destroy()

    docker_room.runner.run(main())


def test_a_container_ends_by_itself_and_is_swept_when_its_time_is_over(docker_engine: TestEngine) -> None:
    api = docker.client(docker_engine.url)
    wanted = creation(IMAGE, spec(), 1, {OWNER: "nobody", EXPIRES: "1"})
    container = api.create_container(**wanted, host_config=api.create_host_config(network_mode="none"))["Id"]
    api.start(container)
    assert api.wait(container)["StatusCode"] == 0
    later = api.create_container(**wanted | {"labels": {OWNER: "nobody", EXPIRES: str(int(time.time()) + 1000)}})["Id"]
    assert owner.remove_expired(api) == [f"container {container[:12]}"]
    assert ours(docker_engine, "nobody") == [later]
    api.remove_container(later)
    api.close()


# ---------------------------------------------------------------- images


def test_a_missing_image_is_named(docker_room: DockerRoom) -> None:
    async def main() -> None:
        for image, words in ((None, "no image is named"), ("no-such-image:9", "no-such-image:9")):
            with pytest.raises(ImageError, match=words):
                await docker_room.host.create(spec(image=image))

    docker_room.runner.run(main())


def test_the_images_own_work_directory_gives_way_to_the_tasks_tree(docker_room: DockerRoom, tmp_path: Path) -> None:
    """And its variables reach commands: a task's image knows where its programs are."""
    api = docker.client(docker_room.engine.url)
    made = api.create_container(IMAGE, ["/bin/sh", "-c", "mkdir -p /app/.git; echo fix > /app/.git/fix; echo old > /app/old"])["Id"]
    api.start(made)
    api.wait(made)
    image = api.commit(made, changes=["ENV PATH=/opt/tool/bin:/usr/bin:/bin", "ENV TASK=1"])["Id"]
    (tmp_path / "main.py").write_text("x = 1\n")

    async def main() -> None:
        sandbox = await docker_room.host.create(spec(image=image, workspace=tmp_path, workdir="/app"))
        found = await sandbox.exec("ls -A; cat main.py; echo $PATH $TASK $HOME; find / -name fix -not -path '/proc/*' 2>/dev/null")
        assert found.stdout == b"main.py\nx = 1\n/opt/tool/bin:/usr/bin:/bin 1 /home/agent\n"
        await sandbox.exec("echo x = 2 > main.py")
        await sandbox.kill()
        assert [(change.path, change.data) for change in await sandbox.changes()] == [("main.py", b"x = 2\n")]
        await sandbox.destroy()

    try:
        docker_room.runner.run(main())
    finally:
        api.remove_container(made)
        api.close()


def test_images_are_built_and_trees_copied_out_before_a_run(docker_room: DockerRoom, tmp_path: Path) -> None:
    """As `environment/Dockerfile` of two tasks: one wants the network."""
    good, bad = tmp_path / "good" / "environment", tmp_path / "bad" / "environment"
    steps = "RUN mkdir -p /app/sub; cd /app; echo x > sub/file; chmod 755 sub/file; ln -s /etc/passwd link; ln sub/file hard"
    for place, text in ((good, steps), (bad, "RUN python3 -c 'import pip' || exec 3<> /dev/tcp/192.0.2.1/80")):
        place.mkdir(parents=True)
        (place / "Dockerfile").write_text(f"FROM {IMAGE}\n{text}\n")

    async def main() -> None:
        host = docker_room.host
        failed = await host.fetch({IMAGE: None, "made:1": good, "made:2": bad})
        assert list(failed) == ["made:2"]
        assert "the Dockerfile of bad cannot be built" in failed["made:2"]
        assert "Step 2/2 : RUN" in failed["made:2"]
        await host.copy_out("made:1", "/app", tmp_path / "tree")
        found = {str(path.relative_to(tmp_path / "tree")): path for path in (tmp_path / "tree").rglob("*")}
        assert sorted(found) == ["hard", "link", "sub", "sub/file"]
        assert (found["link"].readlink(), found["sub/file"].stat().st_mode & 0o777) == (Path("/etc/passwd"), 0o755)
        assert found["hard"].read_text() == "x\n"
        for image, path in (("made:1", "/no/such"), ("made:1", "/app/sub/file"), ("made:9", "/app")):
            with pytest.raises(ImageError):
                await host.copy_out(image, path, tmp_path / "other")
            assert not (tmp_path / "other").exists()

    docker_room.runner.run(main())


# ---------------------------------------------------------------- dead owners

_OWNER = """
import asyncio, sys
from pathlib import Path
from sandbox.environments.docker.host import DockerHost
from sandbox.environments.spec import SandboxSpec
from server.schemas.runspec import Sandbox
async def main():
    settings = Sandbox.model_validate_json(sys.argv[2])
    host = await DockerHost.start(Path(sys.argv[1]), settings)
    sandbox = await host.create(SandboxSpec(image=settings.image, limits=settings.limits))
    print("ready", flush=True)
    await sandbox.exec("sleep 600")
asyncio.run(main())
"""


def test_what_a_killed_runner_left_is_swept_by_the_next_one_and_nothing_else(docker_engine: TestEngine, tmp_path: Path) -> None:
    api = docker.client(docker_engine.url)
    stranger = api.create_container(IMAGE, ["true"])["Id"]
    settings = settings_for(docker_engine).model_dump_json()
    dead = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path), settings], stdout=subprocess.PIPE)
    assert dead.stdout is not None
    assert dead.stdout.readline() == b"ready\n"
    (state,) = tmp_path.iterdir()
    token = state.name.removeprefix("docker-")
    assert DockerHost.sweep(tmp_path) == []  # it lives
    dead.kill()
    dead.wait()
    assert owner.listed(tmp_path) == [f"{state} (engine {docker_engine.url})"]
    assert len(ours(docker_engine, token)) == 3  # a container, and the two images it was made from

    async def main() -> None:
        async with DockerHost.open(tmp_path, settings_for(docker_engine)):
            assert ours(docker_engine, token) == []
            assert not state.exists()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
    assert ours(docker_engine, token) == []
    api.remove_container(stranger)
    api.close()


def test_nothing_is_left_of_a_host(docker_engine: TestEngine) -> None:
    threads, descriptors = threading.active_count(), open_files()

    async def main() -> None:
        async with started(docker_engine) as host:
            await host.create(spec())
            sandbox = await host.create(spec(directories=(Directory("/logs/agent"),)))
            await sandbox.open_gate("127.0.0.1", 9)
            running = asyncio.create_task(sandbox.exec("sleep 4721.25"))
            await until(lambda: processes("sleep 4721.25"))
            running.cancel()
            await asyncio.wait([running])

    before = ours(docker_engine)
    asyncio.run(main())
    assert ours(docker_engine) == before
    for _ in range(600):
        gc.collect()  # the SDK's responses hold each other
        if threading.active_count() <= threads and open_files() <= descriptors:
            return
        time.sleep(0.05)
    raise AssertionError((threads, threading.enumerate(), descriptors, open_files()))


def test_an_engine_that_dies_loses_its_sandboxes_and_says_so(tmp_path: Path) -> None:
    if reason := docker.missing():
        pytest.skip(reason)

    async def main() -> None:
        with docker.engine() as engine:
            host = await DockerHost.start(tmp_path, settings_for(engine))
            sandbox = await host.create(spec())
            running = asyncio.create_task(sandbox.exec("echo begun; sleep 4722.25"))
            await until(lambda: processes("sleep 4722.25"))
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(SandboxLost):
                await running
            with pytest.raises(SandboxError, match="cannot be reached"):
                await host.create(spec())
            await sandbox.destroy()
            await host.stop()
        assert len(list(tmp_path.iterdir())) == 1, "it tells a later start what to sweep"
        with pytest.raises(SandboxError, match="cannot be reached"):
            await DockerHost.start(tmp_path, settings_for(engine))

    asyncio.run(main())


# ---------------------------------------------------------------- an engine elsewhere

_CERTIFICATES = """
set -e
cd {place}
new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
openssl req -x509 $new -keyout ca-key.pem -out ca.pem -subj /CN=authority -days 2
for who in server cert; do
  openssl req $new -keyout $who-key.pem -out $who.csr -subj /CN=$who
  printf 'subjectAltName=IP:127.0.0.1\\nextendedKeyUsage=serverAuth,clientAuth\\n' > ext
  openssl x509 -req -in $who.csr -CA ca.pem -CAkey ca-key.pem -CAcreateserial -out $who.pem -days 2 -extfile ext
done
mv cert-key.pem key.pem
"""


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The section `docker` for an engine behind TCP with TLS, which knows nothing of this machine's files."""
    if reason := docker.missing():
        pytest.skip(reason)
    subprocess.run(["sh", "-c", _CERTIFICATES.format(place=tmp_path)], check=True, capture_output=True)
    with docker.tls_engine(tmp_path) as port:
        yield {"url": f"tcp://127.0.0.1:{port}", "tls": str(tmp_path)}


def test_an_engine_behind_tls_gets_runtimes_and_trees_as_images(remote: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "main.py").write_text("x = 1\n")
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "tool.py").write_text("print('from the runtime')\n")
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "HEAD").write_text("ref\n")

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        settings = settings_for(TestEngine("", 0, tmp_path), docker=remote)
        async with DockerHost.open(tmp_path / "state", settings) as host:
            mounts = (RoMount(tmp_path / "runtime", "/opt/runtime"), RoMount(tmp_path / "history", "/workspace/.git"))
            sandbox = await host.create(spec(workspace=tmp_path / "tree", mounts=mounts))
            assert (await sandbox.exec("python3 /opt/runtime/tool.py; cat .git/HEAD")).stdout == b"from the runtime\nref\n"
            assert (await sandbox.exec("touch /opt/runtime/x || touch .git/x || rm .git/HEAD")).return_code == 1
            await sandbox.open_gate("127.0.0.1", server.sockets[0].getsockname()[1])
            talk = "exec 3<> /dev/tcp/127.0.0.1/8000; echo hello >&3; cat <&3"
            assert (await sandbox.exec(talk)).stdout == b"heard hello\n"
            big = b"x" * 3_000_000
            assert (await sandbox.exec("wc -c", stdin=big)).stdout == b"3000000\n"
            assert len((await sandbox.exec("cat", stdin=big, max_output=4 << 20)).stdout) == len(big)
            await sandbox.kill()
            await sandbox.destroy()
        server.close()

    asyncio.run(main())
    # Without its certificate it is not talked to.
    (tmp_path / "ca.pem").write_bytes((tmp_path / "cert.pem").read_bytes())
    problems = DockerHost.problems(settings_for(TestEngine("", 0, tmp_path), docker=remote))
    assert len(problems) == 1
    assert "cannot be reached" in problems[0]


# ---------------------------------------------------------------- the test before a run


@pytest.mark.parametrize(
    ("said", "kept", "complaint"),
    [
        (b'"NetworkMode": "none"', b'"NetworkMode": "host"', "network interfaces: docker0"),
        (b'"CapDrop": ["ALL"]', b'"CapDrop": [     ]', "hold capabilities"),
    ],
)
def test_an_engine_that_does_not_keep_its_word_is_not_used(
    docker_engine: TestEngine, tmp_path: Path, said: bytes, kept: bytes, complaint: str
) -> None:
    """What stands between us and the engine may change what it is asked: only a look from inside tells."""
    changes = {said: kept, b'"NetworkDisabled": true': b'"NetworkDisabled":false'}
    with docker.meddler(docker_engine.url, tmp_path / "front.sock", changes) as url:
        settings = settings_for(docker_engine, docker={"url": url, "mounts": "bind"})

        async def main() -> None:
            with pytest.raises(SandboxError, match=complaint):
                await DockerHost.start(tmp_path / "state", settings)

        asyncio.run(main())
    assert list((tmp_path / "state").iterdir()) == []
