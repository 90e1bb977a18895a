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
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
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
_UP_S = 180
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
def engine(
    *arguments: str,
    listener: socket.socket | None = None,
    network: str = "--bip 198.18.10.1/24",
    storage: Callable[[Path], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[TestEngine]:
    """`arguments` are more options of `dockerd`, which also listens on `listener`; `storage` mounts what its data lies in, if anything.

    RuntimeError with the end of its log if it fails.
    """
    root = Path(tempfile.mkdtemp(prefix="lego-engine-"))
    parent = f"lego-engine-{secrets.token_hex(4)}"
    (root / "data").mkdir()
    try:
        with storage(root / "data"):
            yield from _engine(root, parent, (network, *arguments), listener)
    finally:
        _remove(root, parent)


def _engine(root: Path, parent: str, arguments: tuple[str, ...], listener: socket.socket | None) -> Iterator[TestEngine]:
    # A socket made out here is handed over as systemd does it: the engine has no network that we could reach.
    handed = f"exec 3<&{listener.fileno()}; export LISTEN_PID=$$ LISTEN_FDS=1; set -- -H fd://;" if listener else ""
    paths = f"--data-root {root}/data --exec-root {root}/exec --pidfile {root}/pid -H unix://{root}/docker.sock"
    options = f"--cgroup-parent {parent} --storage-driver overlay2 {' '.join(arguments)}"
    command = f'ip link set lo up 2>/dev/null; {handed} exec dockerd "$@" {paths} {options}'
    namespaces = ["unshare", "-m", "-n", "-p", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [*namespaces, "bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(listener.fileno(),) if listener else (),
        )
    try:
        _wait(root, process)
        load_image(f"unix://{root}/docker.sock")
        yield TestEngine(f"unix://{root}/docker.sock", process.pid, root)
    finally:
        process.kill()  # with --kill-child its child, process 1 of the namespace, goes too, and so does everything in it
        process.wait()


@contextlib.contextmanager
def tls_engine(certificates: Path) -> Iterator[int]:
    """An engine that listens on a port of the loopback, with TLS both ways; the port."""
    files = {"tlscacert": "ca.pem", "tlscert": "server.pem", "tlskey": "server-key.pem"}
    options = [f"--{option}={certificates / name}" for option, name in files.items()]
    with socket.create_server(("127.0.0.1", 0)) as listener, engine("--tlsverify", *options, listener=listener):
        yield listener.getsockname()[1]


@contextlib.contextmanager
def meddler(url: str, front: Path, changes: dict[bytes, bytes]) -> Iterator[str]:
    """The URL of a socket behind which every request reaches the engine with `changes`, each as long as what it replaces."""

    def relay(source: socket.socket, target: socket.socket, changed: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for said, kept in changes.items() if changed else ():
                    assert len(said) == len(kept)
                    data = data.replace(said, kept)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(url.removeprefix("unix://"))
                for source, target, changed in ((near, far, True), (far, near, False)):
                    threading.Thread(target=relay, args=(source, target, changed), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(front))
        listener.listen(64)
        threading.Thread(target=serve, daemon=True).start()
        yield f"unix://{front}"
        listener.shutdown(socket.SHUT_RDWR)


def _wait(root: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _UP_S
    while time.monotonic() < end and process.poll() is None:
        if (root / "docker.sock").exists() and b"API listen" in (root / "log").read_bytes():
            return
        time.sleep(0.05)
    raise RuntimeError(f"the engine did not start: {(root / 'log').read_text()[-1000:]}")


def _remove(root: Path, parent: str) -> None:
    """Mounts went with the namespace. Cgroups are busy until the last process has been reaped."""
    for _ in range(1200):
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
            fill(tar)
        file.seek(0)
        api = docker.APIClient(base_url=url)
        api.import_image_from_data(file, repository=IMAGE.split(":", maxsplit=1)[0], tag=IMAGE.split(":")[1])
        api.close()


def fill(tar: tarfile.TarFile) -> None:
    """The root file system of IMAGE."""
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
    texts = {
        "etc/passwd": "root:x:0:0::/root:/bin/sh\n",
        "etc/group": "root:x:0:\n",
        "usr/bin/python3": f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 "$@"\n',
    }
    for name, text in texts.items():
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(text), 0o755
        tar.addfile(info, io.BytesIO(text.encode()))
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
