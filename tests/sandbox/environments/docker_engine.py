"""A real Docker engine for tests, in mount, network and process namespaces of its own, and an image of this machine's programs.

Nothing of it is seen outside: no bridge, no rule, no route, no sysctl. When its first process ends, the kernel ends everything in it; its
cgroups, under one parent of their own, are removed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.environments.docker.host import DockerHost
from server.schemas.runspec import Sandbox as Settings

IMAGE = "lego-test:1"
LIMITS = {"memory_mb": 128, "processes": 32, "cpu_s": 20, "disk_mb": 16, "output_kb": 64}
_PROGRAMS = """
sh bash env cat chmod chown cp cut dd df du echo expr false find grep head hostname id kill ln ls mkdir mkfifo mktemp mv nproc od pgrep
pkill printf ps pwd readlink rm rmdir sed seq sleep sort stat sync tail tar tee test timeout touch tr true truncate uname uniq wc which
xargs yes git mount umount unshare prlimit setsid nohup getent ip perl fallocate flock diff
"""
_UP_S = 30
_GROUPS = ("memory", "cpu", "cpuacct", "cpu,cpuacct", "pids", "freezer", "devices", "blkio", "cpuset", "hugetlb", "net_cls", "perf_event",
           "net_prio", "net_cls,net_prio", "rdma", "misc", "systemd", "unified", "")  # fmt: skip


@dataclass(frozen=True)
class TestEngine:
    __test__ = False

    url: str
    pid: int
    root: Path
    """Its state directory, which also holds what a test wants to keep beside it."""


def missing() -> str:
    """Why no engine can be started here; empty when one can."""
    if os.geteuid():
        return "starting a Docker engine needs root"
    if shutil.which("dockerd") is None:
        return "there is no Docker engine here: `apt-get install docker.io`"
    return ""


@contextlib.contextmanager
def engine(*arguments: str, image: bool = True) -> Iterator[TestEngine]:
    """`arguments` are more options of `dockerd`. Raises RuntimeError with the end of its log when it does not come up."""
    root = Path(tempfile.mkdtemp(prefix="lego-engine-"))
    parent = f"lego-engine-{secrets.token_hex(4)}"
    command = f"""ip link set lo up 2>/dev/null; exec dockerd --data-root {root}/data --exec-root {root}/exec --pidfile {root}/pid \
        -H unix://{root}/docker.sock --bip 198.18.10.1/24 --cgroup-parent {parent} --storage-driver overlay2 {" ".join(arguments)}"""
    namespaces = ["unshare", "-m", "-n", "-p", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [*namespaces, "sh", "-c", command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait(root, process)
        if image:
            load_image(f"unix://{root}/docker.sock")
        yield TestEngine(f"unix://{root}/docker.sock", process.pid, root)
    finally:
        process.kill()  # with --kill-child its child, process 1 of the namespace, goes too, and so does everything in it
        process.wait()
        _remove(root, parent)


def _wait(root: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _UP_S
    while time.monotonic() < end and process.poll() is None:
        if (root / "docker.sock").exists() and b"API listen" in (root / "log").read_bytes():
            return
        time.sleep(0.05)
    raise RuntimeError(f"the engine did not start: {(root / 'log').read_text()[-1000:]}")


def _remove(root: Path, parent: str) -> None:
    """Mounts went with the namespace. Cgroups are busy until the last process has been reaped."""
    for _ in range(100):
        groups = [path for name in _GROUPS for path in Path("/sys/fs/cgroup", name).glob(f"**/{parent}") if path.is_dir()]
        for group in groups:
            for place, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(place)
        if not any(group.exists() for group in groups):
            break
        time.sleep(0.05)
    shutil.rmtree(root, ignore_errors=True)
    assert not root.exists(), f"{root} cannot be removed"


def load_image(url: str) -> None:
    """Give the engine IMAGE: the programs above with their libraries, and a `python3` that is the runner's, which is mounted in it."""
    import docker

    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            _fill(tar)
        file.seek(0)
        api = docker.APIClient(base_url=url)
        api.import_image_from_data(file, repository=IMAGE.split(":", maxsplit=1)[0], tag=IMAGE.split(":")[1])
        api.close()


def _fill(tar: tarfile.TarFile) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        info = tarfile.TarInfo(name)
        if Path(f"/{name}").is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
        else:
            info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    for name, mode in {"tmp": 0o1777, "root": 0o700, "var/tmp": 0o1777, "etc": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755}.items():
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, mode
        tar.addfile(info)
    for name, text in {"etc/passwd": "root:x:0:0::/root:/bin/sh\n", "etc/group": "root:x:0:\n"}.items():
        info = tarfile.TarInfo(name)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text.encode()))
    link = tarfile.TarInfo("usr/bin/python3")
    link.type, link.linkname = tarfile.SYMTYPE, f"{sys.base_prefix}/bin/python3"
    tar.addfile(link)
    programs = {path for name in _PROGRAMS.split() if (path := shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin"))}
    modules = [str(path) for path in Path(sys.base_prefix, "lib").glob("python*/lib-dynload/*.so")]
    listed = subprocess.run(
        ["ldd", *map(os.path.realpath, programs), *modules, os.path.realpath(sys.executable)],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    libraries = {path for path in re.findall(r"(/\S+) \(0x", listed) if not path.startswith(sys.base_prefix)}
    places = {os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path): path for path in programs | libraries}
    for place, path in sorted(places.items()):
        tar.add(os.path.realpath(path), place.lstrip("/"))
    if os.path.isdir("/usr/lib/git-core"):
        tar.add("/usr/lib/git-core", "usr/lib/git-core")


@dataclass
class DockerRoom:
    """A running backend and the loop that it lives in."""

    runner: asyncio.Runner
    host: DockerHost
    settings: Settings
    engine: TestEngine


def settings_for(found: TestEngine, **more: Any) -> Settings:
    document = {"environment": "docker", "image": IMAGE, "docker": {"url": found.url}, "concurrency": 8, "limits": LIMITS}
    return Settings.model_validate(document | more)


@contextlib.contextmanager
def docker_room(found: TestEngine) -> Iterator[DockerRoom]:
    settings = settings_for(found)
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="docker-room-") as state:
        host = runner.run(DockerHost.start(Path(state), settings))
        try:
            yield DockerRoom(runner, host, settings, found)
        finally:
            runner.run(host.stop())
        assert list(Path(state).iterdir()) == []


def client(url: str) -> Any:
    import docker

    return docker.APIClient(base_url=url)
