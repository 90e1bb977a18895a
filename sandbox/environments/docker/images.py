"""What containers are made from: the task's image, with the agent's user, our directories and the pristine tree, committed once each.

In steps, so that what many share is stored once: the base image with users and directories; for an engine that cannot bind from this
machine, the runner's Python and then the runtimes; the task's tree in its work directory. All are this owner's own and go when it stops.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sandbox.environments.errors import ImageError, SandboxError, SandboxLost
from sandbox.environments.spec import Directory, RoMount, SandboxSpec

from .container import AGENT
from .engine import Engine

_MAX_USERS = 1 << 20
_PREPARING = 4
_PASSWD = f"agent:x:{AGENT}:{AGENT}::/home/agent:/bin/sh\n"
_GROUP = f"agent:x:{AGENT}:\n"
# Runtimes of a runner that is root lie below its home; an image keeps that to root.
_PLACES = (Directory("/root", "root"), Directory("/home/agent"), Directory("/tmp", "root", 0o1777), Directory("/var/tmp", "root", 0o1777))  # noqa: S108


@dataclass(frozen=True)
class Prepared:
    """An image to make containers from, the variables that its maker set, and the shell that commands run in."""

    image: str
    env: dict[str, str]
    shell: str


@dataclass
class Images:
    """Of one owner. `labels` mark what is made; with `python` it and the mounts are copied into images, otherwise they are bound."""

    engine: Engine
    labels: dict[str, str]
    python: RoMount | None
    _made: dict[object, asyncio.Task[Prepared]] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PREPARING))

    async def prepared(self, spec: SandboxSpec) -> Prepared:
        """The image for a sandbox. Raises ImageError when its base is missing or cannot be used."""
        if spec.image is None:
            raise ImageError(
                "no image is named: set `docker_image` in [environment] of the task's task.toml, or `sandbox.image` in the RunSpec"
            )
        inner, outer = _split(spec) if self.python else ((), ())
        common = (spec.image, spec.directories)
        base = ready = await self._once(common, lambda: self._common(spec.image or "", spec.directories))
        if outer:
            ready = await self._once((common, outer), lambda: self._with_mounts(base, outer))
        whole = (common, outer, spec.workspace, spec.workdir, inner)
        return await self._once(whole, lambda: self._with_tree(ready, spec.workspace, spec.workdir, inner))

    async def _once(self, key: object, make: Callable[[], Awaitable[Prepared]]) -> Prepared:
        """Many ask for one image at a time, and one of them may be cancelled: the work goes on for the others. A failure is not kept."""

        async def work() -> Prepared:
            async with self._slots:
                return await make()

        task = self._made.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._made[key] = asyncio.create_task(work())
        return await asyncio.shield(task)

    async def _common(self, reference: str, directories: tuple[Directory, ...]) -> Prepared:
        found = await self.engine.call(self.engine.api.inspect_image, reference)
        if (found.get("Os"), found.get("Architecture")) != ("linux", "amd64"):
            raise ImageError(f"image {reference} is for {found.get('Os')} on {found.get('Architecture')}: use one for linux on amd64")
        env = dict(line.split("=", 1) for line in found["Config"].get("Env") or () if "=" in line)

        shells: list[str] = []

        async def fill(container: str) -> None:
            shells.append("/bin/bash" if await self._has(container, "/bin/bash") else "/bin/sh")
            users = [
                ("etc/passwd", await self._text(container, "/etc/passwd") + _PASSWD),
                ("etc/group", await self._text(container, "/etc/group") + _GROUP),
            ]
            await self._put(container, lambda tar: _write_common(tar, users, directories, self.python))

        return Prepared(await self._derived(found["Id"], fill), env, shells[0])

    async def _with_mounts(self, base: Prepared, mounts: tuple[RoMount, ...]) -> Prepared:
        async def fill(container: str) -> None:
            await self._put(container, lambda tar: _write_mounts(tar, mounts))

        return replace(base, image=await self._derived(base.image, fill))

    async def _with_tree(self, base: Prepared, tree: Path | None, workdir: str, mounts: tuple[RoMount, ...]) -> Prepared:
        async def fill(container: str) -> None:
            await self._put(container, lambda tar: _write_tree(tar, tree, workdir, mounts))

        return replace(base, image=await self._derived(base.image, fill, empty=workdir))

    async def _derived(self, image: str, fill: Callable[[str], Awaitable[None]], empty: str | None = None) -> str:
        """The id of an image that is `image` after `fill`; `empty` is a directory that is removed before."""
        api = self.engine.api
        made = await self.engine.call(
            lambda: api.create_container(
                image,
                entrypoint=["/bin/rm", "-rf", "--", empty or "/nothing"],
                command=[],
                user="0:0",
                network_disabled=True,
                labels=self.labels,
                host_config=api.create_host_config(network_mode="none"),
            )
        )
        try:
            if empty is not None and await self._has(made["Id"], empty):
                await self.engine.call(api.start, made["Id"])
                ended = await self.engine.call(api.wait, made["Id"])
                if ended["StatusCode"] != 0:
                    raise ImageError(f"{empty} of image {image[:19]} cannot be emptied (exit {ended['StatusCode']}): is there /bin/rm?")
            await fill(made["Id"])
            labels = [f"LABEL {name}={value}" for name, value in self.labels.items()]
            committed = await self.engine.call(api.commit, made["Id"], pause=False, changes=labels)
        finally:
            await self.engine.call(api.remove_container, made["Id"], force=True, v=True)
        return str(committed["Id"])

    async def _has(self, container: str, path: str) -> bool:
        def look() -> None:
            chunks, _ = self.engine.api.get_archive(container, path)
            chunks.close()

        try:
            await self.engine.call(look)
        except SandboxLost:
            raise
        except SandboxError:
            return False
        return True

    async def _text(self, container: str, path: str) -> str:
        def read() -> str:
            chunks, _ = self.engine.api.get_archive(container, path)
            data = b"".join(chunks)
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                file = tar.extractfile(tar.next() or tarfile.TarInfo())
                text = file.read(_MAX_USERS).decode(errors="replace") if file is not None else ""
            return text if not text or text.endswith("\n") else text + "\n"

        try:
            return await self.engine.call(read)
        except (SandboxError, KeyError, tarfile.TarError):
            return ""  # an image without users

    async def _put(self, container: str, write: Callable[[tarfile.TarFile], None]) -> None:
        """Extract what `write` puts into a tar at the container's root. It goes through a file: trees may be large."""
        await self.engine.call(put, self.engine.api, container, write)

    async def settle(self) -> None:
        """End what is under way. What was made is found by its label."""
        for task in self._made.values():
            task.cancel()
        if self._made:
            await asyncio.wait(self._made.values())


def put(api: Any, container: str, write: Callable[[tarfile.TarFile], None]) -> None:
    """Blocks."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            write(tar)
        file.seek(0)
        api.put_archive(container, "/", file)


def remove_image(api: Any, image: str) -> None:
    """Blocks. One that a container still uses stays, for the next sweep."""
    from docker.errors import APIError

    try:
        api.remove_image(image, noprune=False)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


def _split(spec: SandboxSpec) -> tuple[tuple[RoMount, ...], tuple[RoMount, ...]]:
    """The mounts inside the work directory, and the others."""
    inner = tuple(mount for mount in spec.mounts if mount.at.startswith(f"{spec.workdir}/"))
    return inner, tuple(mount for mount in spec.mounts if mount not in inner)


def _write_common(tar: tarfile.TarFile, users: list[tuple[str, str]], directories: Iterable[Directory], python: RoMount | None) -> None:
    for parent in _parents([place.path for place in directories]):
        _directory(tar, parent, "root", 0o755)
    for place in (*_PLACES, *directories):
        _directory(tar, place.path, place.owner, place.mode)
    for name, text in users:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(text.encode()), 0o644
        tar.addfile(info, io.BytesIO(text.encode()))
    if python is not None:
        _write_mounts(tar, (python,))


def _write_mounts(tar: tarfile.TarFile, mounts: tuple[RoMount, ...]) -> None:
    for parent in _parents([mount.at for mount in mounts]):
        _directory(tar, parent, "root", 0o755)
    for mount in mounts:
        tar.add(mount.source.resolve(), mount.at.lstrip("/"), filter=_as_root)


def _write_tree(tar: tarfile.TarFile, tree: Path | None, workdir: str, mounts: tuple[RoMount, ...]) -> None:
    for parent in _parents([workdir]):
        _directory(tar, parent, "root", 0o755)
    if tree is None:
        _directory(tar, workdir, "agent", 0o755)
    else:
        tar.add(tree, workdir.lstrip("/"), filter=_as_agent)
    for mount in mounts:
        tar.add(mount.source.resolve(), mount.at.lstrip("/"), filter=_as_root)


def _parents(paths: Iterable[str]) -> list[str]:
    """Directories on the way to `paths` that an image may lack or keep to itself, outermost first."""
    found = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    return sorted(found - {"/", "/tmp", "/var", "/etc"})  # noqa: S108


def _directory(tar: tarfile.TarFile, path: str, owner: str, mode: int) -> None:
    info = tarfile.TarInfo(path.lstrip("/"))
    info.type, info.mode = tarfile.DIRTYPE, mode
    info.uid = info.gid = AGENT if owner == "agent" else 0
    tar.addfile(info)


def _as_agent(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = AGENT
    info.uname = info.gname = ""
    return info


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
