"""The backend `docker`: one engine, through which a runner makes a container per agent and per verifier."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, override

from sandbox.environments.backend import Backend
from sandbox.environments.errors import ImageError, SandboxError
from sandbox.environments.images.cache import cache_of
from sandbox.environments.spec import LimitsMode, RoMount, SandboxSpec
from server.schemas.runspec import Sandbox as Settings

from . import collect, owner, probe
from .container import EXPIRES, OWNER, TRIAL, creation, host_config
from .engine import OLDEST_API, Engine, boundary, connect
from .fetch import copy_out, fetch_all
from .images import Images
from .sandbox import DockerSandbox
from .watch import Watch

_STARTING = 8
_SPARE_S = 900
"""What a container lives on beyond the time that all stages of a trial may take."""


class DockerHost(Backend):
    """`python` is the directory that lies at `sys.base_prefix` in every container: this runner's Python, with its own libraries."""

    def __init__(self, engine: Engine, settings: Settings, owned: owner.Owned, version: str, python: Path) -> None:
        self._engine = engine
        self._settings = settings
        self._owned = owned
        self._prefix = RoMount(python, sys.base_prefix)
        self._bind = (settings.docker.mounts or ("bind" if settings.docker.url.startswith("unix://") else "copy")) == "bind"
        self._quota = False
        self._images = Images(engine, {OWNER: owned.token}, python=None if self._bind else self._prefix)
        self._watch = Watch(engine, owned.token)
        self._slots = asyncio.Semaphore(_STARTING)
        self.label = f"docker/{version}"
        self.limits_mode: LimitsMode = "cgroup"
        self.python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))

    @classmethod
    @override
    async def start(cls, base: Path, settings: Settings) -> Self:
        if found := await asyncio.to_thread(cls.problems, settings):
            raise SandboxError("; ".join(found))
        engine = await Engine.open(settings.docker)
        try:
            version = (await engine.call(engine.api.version)).get("Version", "?")
            python = await asyncio.to_thread(cache_of(settings).python)
            await asyncio.to_thread(owner.sweep, base)
            await engine.call(owner.remove_expired, engine.api)
            try:
                owned = owner.claim(base, settings.docker)
            except OSError as error:
                raise SandboxError(f"cannot keep state in {base}: {error.strerror}; choose a directory that you can write") from error
        except SandboxError:
            await engine.close()
            raise
        host = cls(engine, settings, owned, version, python)
        if not (python / Path(host.python).relative_to(sys.base_prefix)).exists():
            await host.stop()
            raise SandboxError(f"{python} is not whole: remove that directory, and it is made again")
        try:
            host._quota = await engine.call(quota_works, engine.api, settings.image)
            await probe.hold(host, settings)
        except BaseException:  # a cancellation too must not leave containers behind
            await host.stop()
            raise
        host._announce(base)
        return host

    @classmethod
    @override
    def problems(cls, settings: Settings) -> list[str]:
        if settings.image is None:
            return ["sandbox.image is not set: name an image that the engine has, for tasks without one and for the test before a run"]
        if (prefix := Path(sys.base_prefix)) in (Path("/usr"), Path("/usr/local")):
            return [f"this runner's Python lies in {prefix}, where an image has its own: use a Python with its own prefix, such as uv's"]
        try:
            api = connect(settings.docker)
            with boundary(settings.docker.url), contextlib.closing(api):
                return judge(api.version(), api.info())
        except SandboxError as error:
            return [str(error)]

    @classmethod
    @override
    def sweep(cls, base: Path) -> list[str]:
        return owner.sweep(base)

    @classmethod
    @override
    def abandoned(cls, base: Path) -> list[str]:
        return owner.listed(base)

    @override
    async def fetch(self, images: Mapping[str, Path | None]) -> dict[str, str]:
        return await fetch_all(self._engine, images, self._settings.images)

    @override
    async def copy_out(self, image: str, path: str, target: Path) -> None:
        try:
            await self._engine.call(copy_out, self._engine.api, image, path, target)
        except SandboxError as error:
            raise error if isinstance(error, ImageError) else ImageError(f"image {image}: {error}") from error

    @override
    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        prepared = await self._images.prepared(spec)
        mounts = (self._prefix, *spec.mounts) if self._bind else ()
        binds = {str(mount.source.resolve()): mount.at for mount in mounts}
        budgets = self._settings.budgets
        seconds = int(budgets.sandbox_setup_s + budgets.agent_setup_s + budgets.agent_s + budgets.verifier_s) + _SPARE_S
        labels = {OWNER: self._owned.token, EXPIRES: str(int(time.time()) + seconds), TRIAL: spec.name}
        wanted = creation(prepared.image, spec, seconds, labels)
        name = f"lego-rl-{re.sub(r'[^a-zA-Z0-9_.-]', '-', spec.name)[:60]}-{secrets.token_hex(4)}"
        api = self._engine.api
        async with self._slots:
            confined = api.create_host_config(**host_config(spec, binds, self._quota))
            making = asyncio.ensure_future(self._engine.call(_make, api, wanted, confined, name))
            try:
                container = await asyncio.shield(making)
            except asyncio.CancelledError:
                making.add_done_callback(self._abandon)
                raise
        sandbox = DockerSandbox(self._engine, container, spec, self.python, prepared)
        self._watch.add(sandbox)
        return sandbox

    def _abandon(self, making: asyncio.Future[str]) -> None:
        """A creation that nobody waits for any more finished: undo it."""
        if not making.cancelled() and making.exception() is None:
            self._undoing = asyncio.ensure_future(self._engine.call(collect.remove, self._engine.api, making.result()))

    @override
    async def stop(self) -> None:
        """Also what a trial left running, by its label."""
        self._withdraw(self._owned.state.parent)
        await self._watch.stop()
        try:
            await self._images.settle()
            await self._engine.call(owner.remove_all, self._engine.api, self._owned.token)
            await asyncio.to_thread(shutil.rmtree, self._owned.state)
        except SandboxError:
            pass  # the engine is gone; the state directory tells the next start to sweep
        finally:
            os.close(self._owned.record)
            with contextlib.suppress(SandboxError):
                await self._engine.close()


def _make(api: Any, wanted: dict[str, Any], confined: dict[str, Any], name: str) -> str:
    """Blocks. A container that was made but does not start is removed."""
    container: str = api.create_container(**wanted, host_config=confined, name=name)["Id"]
    try:
        api.start(container)
    except BaseException:  # also the end of this process's thread: a container that nobody waits for must not stay
        collect.remove(api, container)
        raise
    return container


def judge(version: dict[str, Any], info: dict[str, Any]) -> list[str]:
    """What an engine says of itself that rules it out, each with what to do. Pure."""
    found = []
    if tuple(map(int, version.get("ApiVersion", "0.0").split("."))) < tuple(map(int, OLDEST_API.split("."))):
        found.append(f"the engine's API is {version.get('ApiVersion')}, older than {OLDEST_API}: use Docker 20.10 or newer")
    if (info.get("OSType"), info.get("Architecture")) != ("linux", "x86_64"):
        found.append(f"the engine runs {info.get('OSType')} on {info.get('Architecture')}: use one on Linux, x86_64")
    missing = [words for key, words in (("MemoryLimit", "memory"), ("PidsLimit", "processes")) if not info.get(key)]
    if missing:
        found.append(f"the engine cannot limit {' and '.join(missing)} of containers: it needs cgroups with those controllers")
    if not any("seccomp" in option for option in info.get("SecurityOptions") or ()):
        found.append("the engine has no seccomp: system calls could not be filtered; use one that is built with it")
    return found


def quota_works(api: Any, image: str | None) -> bool:
    """Blocks. Whether the engine's storage bounds a container's disk by itself; only some do, and none says so before it is asked."""
    from docker.errors import APIError, ImageNotFound

    options = {"storage_opt": {"size": "64m"}, "network_mode": "none"}
    try:
        made = api.create_container(image, ["true"], network_disabled=True, host_config=api.create_host_config(**options))
    except ImageNotFound:
        raise
    except APIError:
        return False
    collect.remove(api, made["Id"])
    return True
