"""The asyncio side of the spawner: starts it, makes sandboxes through it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, override

from sandbox.environments.backend import Backend
from sandbox.environments.errors import ImageError, SandboxError
from sandbox.environments.images.cache import IN_PLACE, Rootfs, cache_of
from sandbox.environments.images.fetch import fetch_all, lacking
from sandbox.environments.images.tree import copy_tree
from sandbox.environments.spec import OPEN_FILES, UNWATCHED_CPU_S, LimitsMode, SandboxSpec
from server.schemas.runspec import Sandbox as Settings

from . import owner
from .channel import Channel
from .preflight import Mode, default_mode, problems
from .sandbox import Sandbox

_BOOT = """
import json, sys
sys.path.append(sys.argv[1])
from sandbox.environments.namespace.spawner import main
main(*json.loads(sys.argv[2]))
"""
_ROOT = str(Path(__file__).parents[3])
_PYTHON_IN_USR = Path(sys.base_prefix).is_relative_to("/usr")
_START_S = 20
_CREATE_S = 60
_STOP_S = 20
_OPEN_FILES = 65536


def _raise_open_files() -> None:
    """Lift this process's soft limit of open files towards the hard one.

    Every sandbox needs a few. And as an ordinary user we share with agents the count of descriptors that are under way in unix sockets:
    whoever has the lower limit cannot pass any more, and that must be the agent.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Host(Backend):
    """A running spawner."""

    can_fork: ClassVar[bool] = True

    def __init__(
        self, process: asyncio.subprocess.Process, channel: Channel, state: Path, mode: Mode, limits_mode: LimitsMode, settings: Settings
    ) -> None:
        self._settings = settings.images
        self._images = cache_of(settings)
        self._rootfs: dict[str, Rootfs] = {}
        self._held = contextlib.ExitStack()
        self._process = process
        self._channel = channel
        self._state = state
        self.mode: Mode = mode
        self.limits_mode = limits_mode
        self.label = f"namespace/{mode}"

    @classmethod
    @override
    async def start(cls, base: Path, settings: Settings | None = None, mode: Mode | None = None) -> Self:
        """Sweep `base` (see `owner.sweep`) and start a spawner with its state below it.

        `mode` is `rootful` for root and `rootless` for anyone else unless given. Raises SandboxError with what to do when this machine
        cannot run sandboxes in that mode.
        """
        mode = mode or default_mode()
        _raise_open_files()
        if found := problems(mode):
            raise SandboxError("; ".join(found))
        try:
            await asyncio.to_thread(owner.sweep, base)
            state, record = owner.claim(base)
        except OSError as error:
            raise SandboxError(
                f"cannot keep the state of sandboxes in {base}: {error.strerror}; choose a directory that you can write"
            ) from error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                arguments = json.dumps([theirs.fileno(), str(state), mode == "rootless", record])
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _BOOT, _ROOT, arguments),
                    pass_fds=(theirs.fileno(), record),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={},
                    start_new_session=True,
                )
            finally:
                os.close(record)
        channel = Channel(ours, "the sandbox spawner")
        try:
            async with asyncio.timeout(_START_S):
                message, _ = await channel.hello.started
        except (SandboxError, TimeoutError) as error:
            channel.close()
            await process.wait()
            owner.remove(state)
            raise SandboxError(f"cannot start the sandbox spawner: {error or 'no answer'}") from error
        host = cls(process, channel, state, mode, message["limits"], settings or Settings())
        host._announce(base)
        return host

    @classmethod
    @override
    def problems(cls, settings: Settings) -> list[str]:
        return [*problems(default_mode()), *lacking(settings.images)]

    @classmethod
    @override
    def sweep(cls, base: Path) -> list[str]:
        return [str(base / token) for token in owner.sweep(base)]

    @property
    def pid(self) -> int:
        return self._process.pid

    @override
    async def ended(self) -> str:
        await self._process.wait()
        return "the sandbox spawner died"

    @override
    def exposed(self, path: Path) -> Path | None:
        place = path.resolve()
        return next((seen for seen in (Path("/usr"), Path(sys.base_prefix).resolve()) if place.is_relative_to(seen)), None)

    @override
    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.image and _PYTHON_IN_USR:
            raise ImageError(
                "the runner's Python lies in /usr, where an image has its own files: run it with a Python elsewhere, such as uv's"
            )
        rootfs = await asyncio.to_thread(self._image, spec.image) if spec.image else None
        python = str(await asyncio.to_thread(self._images.python)) if rootfs and spec.grading else sys.base_prefix
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control = Channel(ours, "the sandbox")
        request = self._request(spec, rootfs, python)
        with theirs:
            creating = asyncio.ensure_future(self._channel.ask(request, (theirs.fileno(),)))
            try:
                async with asyncio.timeout(_CREATE_S):
                    message, _ = await asyncio.shield(creating)
            except BaseException:  # a cancellation too must not leave a sandbox that nobody holds
                control.close()
                if not creating.done():
                    creating.add_done_callback(self._abandon)
                raise
        return Sandbox(self._channel, control, spec, self.mode, self.limits_mode, message, request["rlimits"], rootfs.env if rootfs else {})

    def _image(self, name: str) -> Rootfs:
        """The layers of an image, which nobody removes while this host runs. Raises ImageError."""
        if name not in self._rootfs:
            if not name.startswith(IN_PLACE):
                self._held.enter_context(self._images.held(self._images.require(name)))
            self._rootfs[name] = self._images.rootfs(name)
        return self._rootfs[name]

    def _abandon(self, creating: asyncio.Future[tuple[dict[str, object], list[int]]]) -> None:
        """A creation that nobody waits for any more finished: undo it."""
        if not creating.cancelled() and creating.exception() is None:
            number = creating.result()[0]["sandbox"]
            self._undoing = asyncio.ensure_future(self._channel.call({"op": "destroy", "sandbox": number}))

    @override
    async def fetch(self, images: Mapping[str, Path | None]) -> dict[str, str]:
        failed = await fetch_all(self._images, images, self._settings)
        for name in images.keys() - failed.keys():
            try:
                await asyncio.to_thread(self._image, name)
            except ImageError as error:  # removed since, by another process
                failed[name] = str(error)
        if images:  # a run without any has no business in the cache, and may not be allowed there
            await asyncio.to_thread(self._images.prune, int(self._settings.cache_gb * 1e9))
        return failed

    @override
    async def copy_out(self, image: str, path: str, target: Path) -> None:
        rootfs = await asyncio.to_thread(self._image, image)
        await asyncio.to_thread(copy_tree, rootfs.layers, path, target)

    def _request(self, spec: SandboxSpec, rootfs: Rootfs | None, python: str) -> dict[str, Any]:
        limits = spec.limits
        watched = self.limits_mode == "cgroup"
        rlimits = {
            "CORE": 0,
            "CPU": limits.cpu_s + UNWATCHED_CPU_S if watched else limits.cpu_s,
            "FSIZE": limits.disk_mb << 20,
            "NOFILE": min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4),
        }
        if not watched:
            rlimits |= {"DATA": limits.memory_mb << 20, "NPROC": limits.processes + 1}
        mounts = [(str(mount.source.resolve()), mount.at) for mount in spec.mounts]
        return {
            "op": "create",
            "workspace": str(spec.workspace.resolve()) if spec.workspace else None,
            "workdir": spec.workdir,
            "mounts": mounts if _PYTHON_IN_USR else [(python, sys.base_prefix), *mounts],
            "layers": [str(layer) for layer in rootfs.layers] if rootfs else [],
            "directories": [(directory.path, directory.owner, directory.mode) for directory in spec.directories],
            "memory_mb": limits.memory_mb,
            "processes": limits.processes,
            "cpu_s": limits.cpu_s,
            "disk_mb": limits.disk_mb,
            "scratch": limits.scratch,
            "rlimits": rlimits,
        }

    @override
    async def stop(self) -> None:
        """End every sandbox and the spawner, and remove the state directory."""
        self._withdraw(self._state.parent)
        self._channel.close()
        self._held.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._state.exists():
            await asyncio.to_thread(owner.sweep, self._state.parent)
