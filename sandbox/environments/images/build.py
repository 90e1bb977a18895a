"""The image of a task's Dockerfile, built by buildah. This program interprets no Dockerfile.

What a Dockerfile says can be believed next time too: its base images are fetched first, and then the whole build, not its RUN steps alone,
has no network. So a step that fetches something fails at once and is named. `index_mirror` opens one address to it: a Python package
index, for pip and uv. The image's name holds a digest of everything that went into it, so the same files are not built again.

As root the steps run as root of a container without a user namespace: build only Dockerfiles that you would run. An ordinary user needs
ranges in /etc/subuid and /etc/subgid.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from dockerfile_parse import DockerfileParser

from sandbox.environments.errors import ImageError
from sandbox.environments.namespace.gate import Gate

from .cache import Image, ImageCache
from .programs import find, run
from .registry import is_reference, on_this_machine

BUILD_S = 3600
FILE = "Dockerfile"
_ISOLATE = Path(__file__).with_name("isolate.py")
_SOURCE = str(Path(__file__).parents[3])
_PORTS = {"http": 80, "https": 443}


def reference(name: str, context: Path, index_mirror: str = "") -> str:
    """What the image of this context is called: the digest covers names, modes and content of its files, and the mirror."""
    digest = hashlib.sha256(index_mirror.encode())
    for path in sorted(context.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            what = os.fsencode(path.readlink())
        elif path.is_file():
            with path.open("rb") as file:
                what = hashlib.file_digest(file, "sha256").digest()
        else:
            what = b""
        digest.update(repr((str(path.relative_to(context)), status.st_mode, what)).encode())
    return f"localhost/lego-rl/{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'task'}:{digest.hexdigest()[:32]}"


async def build(cache: ImageCache, context: Path, name: str, index_mirror: str = "") -> Image:
    """Build `context/Dockerfile` unless that has been done. Raises ImageError, which names the step that failed."""
    called = await asyncio.to_thread(reference, name, context, index_mirror)
    if found := await asyncio.to_thread(cache.find, called):
        return found
    buildah = find("buildah", f"building the Dockerfile of {name}")
    bases = await asyncio.to_thread(_bases, context / FILE)
    with cache.adding(), cache.staging() as place:
        storage = cache.root / "build"
        tool = [buildah, "--root", str(storage / "root"), "--runroot", str(storage / "run"), "--storage-driver", "overlay"]
        for base in bases:
            plain = ["--tls-verify=false"] if on_this_machine(base) else []
            status, words = await run(_isolated("host", [*tool, "pull", "--policy", "missing", *plain, base]), BUILD_S)
            if status != 0:
                raise ImageError(f"the Dockerfile of {name} starts from {base}, which cannot be fetched: {_last(words)}")
        options = ["--isolation", "oci" if os.geteuid() == 0 else "rootless", "--network", "host", "--pull=never", "--layers"]
        async with _way_out(place, index_mirror) as (more, descriptor, port):
            argv = [*tool, "bud", *options, *more, "--timestamp", "0", "--format", "oci", "--tag", called, str(context)]
            status, words = await run(_isolated("none", argv, descriptor, port), BUILD_S, keep=descriptor)
        if status != 0:
            raise ImageError(_failure(name, words, index_mirror))
        status, words = await run(_isolated("none", [*tool, "push", called, f"oci:{place}/layout:image"]), BUILD_S)
        if status != 0:
            raise ImageError(f"the image of {name} was built and cannot be read: {_last(words)}")
        return await asyncio.to_thread(cache.add_layout, place / "layout", called, "image")


def _bases(file: Path) -> list[str]:
    """The images that a Dockerfile starts from, but for its own stages and the empty one."""
    if not file.is_file():
        raise ImageError(f"{file} is missing")
    with file.open("rb") as content:
        parser = DockerfileParser(fileobj=content)
        stages = {match[1].lower() for match in re.finditer(r"(?im)^\s*FROM\s.*\sAS\s+(\S+)\s*$", parser.content)}
        found = [base for base in dict.fromkeys(parser.parent_images) if base != "scratch" and base.lower() not in stages]
    for base in found:
        if not is_reference(base):
            raise ImageError(f"{file} starts from {base!r}, which is no image of a registry")
    return found


def _isolated(network: str, command: list[str], descriptor: int = 0, port: int = 0) -> list[str]:
    user = [command[0], "unshare"] if os.geteuid() else []
    return [*user, sys.executable, "-I", "-S", str(_ISOLATE), _SOURCE, network, str(descriptor), str(port), *command]


@contextlib.asynccontextmanager
async def _way_out(place: Path, mirror: str) -> AsyncIterator[tuple[list[str], int, int]]:
    """Options, and a descriptor on which the listener of the mirror's port will arrive, which is relayed as long as this lasts."""
    if not mirror:
        yield [], 0, 0
        return
    address = urlsplit(mirror)
    host, port = str(address.hostname), address.port or _PORTS[address.scheme]
    trusted = f"trusted-host = {host}\n" if address.scheme == "http" else ""
    (place / "pip.conf").write_text(f"[global]\nindex-url = {mirror}\n{trusted}")
    (place / "uv.toml").write_text(f'[[index]]\nurl = "{mirror}"\ndefault = true\n')
    options = [f"--volume={place}/pip.conf:/etc/pip.conf:ro", f"--volume={place}/uv.toml:/etc/uv/uv.toml:ro"]
    options += [] if host in ("localhost", "127.0.0.1") else [f"--add-host={host}:127.0.0.1"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    relaying = asyncio.create_task(_relay(ours, host, port))
    try:
        with theirs:
            yield options, theirs.fileno(), port
    finally:
        relaying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await relaying


async def _relay(control: socket.socket, host: str, port: int) -> None:
    with control:
        control.setblocking(False)
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(control, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(control)
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not descriptors:  # it ended before it listened; its exit status says so
        return
    gate = Gate(socket.socket(fileno=descriptors[0]), host, port)
    await gate.open()
    try:
        await asyncio.Event().wait()
    finally:
        await gate.close()


def _failure(name: str, words: str, mirror: str) -> str:
    """buildah ends with `Error: building at STEP "RUN …": while running runtime: exit status 1`; before it stands what the step said."""
    found = re.search(r'building at STEP "(.*?)": (.*)', words, re.DOTALL)
    step, why = (found[1], found[2].strip()) if found else ("", _last(words))
    said = words[: found.start()].strip().splitlines()[-6:-1] if found else []
    network = (
        f"its steps reach nothing but {mirror}"
        if mirror
        else "its steps have no network (sandbox.images.index_mirror allows one package index)"
    )
    at = f" at the step `{step}`" if step else ""
    return f"the Dockerfile of {name} cannot be built{at}: {why}; {network}" + (f"; it said: {' | '.join(said)}" if said else "")


def _last(words: str) -> str:
    return words.splitlines()[-1][-500:] if words else "no answer"
