"""What the engine hands out of a container, dead or alive: archives, the end, counters. Everything here blocks, and runs in the pool.

The engine reads as root of its machine but within the container's root directory; nothing of the container runs for it. What comes is data:
an entry that is neither file, directory nor link is left out, a link is never followed, and a stream is cut when it is too long.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from sandbox.environments.archive import Change, original
from sandbox.environments.errors import SandboxError
from sandbox.environments.namespace.transfer import DEEPEST, MOST, SINGLE

from .archives import asked, below, fairly, opened

COUNTERS = """
import glob, json, os
def text(*names):
    for name in names:
        try:
            with open("/sys/fs/cgroup/" + name) as file: return file.read()
        except OSError: pass
    return ""
def field(text, name):
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)
print(json.dumps({
    "oom_kill": field(text("memory/memory.oom_control", "memory.events"), "oom_kill"),
    "memory_peak": int(text("memory/memory.max_usage_in_bytes", "memory.peak") or 0),
    "pids_hits": field(text("pids/pids.events", "pids.events"), "max"),
    "cpu_ns": int(text("cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage") or 0) or 1000 * field(text("cpu.stat"), "usage_usec"),
}))
"""
"""A program for the container, where its own cgroup is mounted read-only: prints counters of version 1 or 2."""
_LONGEST = 3500
"""Of a path in a tree. The engine leaves out, without a word, what lies deeper than its machine's system calls can name."""


def packed(api: Any, container: str, path: str, max_bytes: int, cut: bool = False) -> bytes:
    """The file or directory `path` as `transfer.pack` packs it, with `cut` as much of it as can be had. Raises SandboxError."""

    def read() -> bytes:
        output = io.BytesIO()
        try:
            _pack(api, container, path, max_bytes, cut, output)
        except SandboxError:
            if not (cut and output.tell()):
                raise
        return output.getvalue()

    return fairly(api, container, read)


def _pack(api: Any, container: str, path: str, max_bytes: int, cut: bool, output: io.BytesIO) -> None:
    what, left = f"cannot download {path}: it", MOST
    real = _real(api, container, path, what)
    with opened(api, container, real, 2 * max_bytes + (1 << 20), what) as given, tarfile.open(fileobj=output, mode="w") as taken:
        for member, name in below(given):
            if (left := left - 1) < 0:
                raise SandboxError(f"cannot download {path}: it has more than {MOST} files and directories")
            if not (member.isreg() or member.isdir() or member.issym()):
                continue
            if (room := max_bytes - output.tell()) < member.size and not cut:
                raise SandboxError(f"cannot download {path}: it is larger than {max_bytes} bytes")
            info = tarfile.TarInfo(name or PurePosixPath(path).name)
            # The engine has an order of its own: a file that does not fit leaves half of the room to those behind it.
            size = member.size if member.size <= room else max(0, room // 2)
            info.type, info.mode, info.size, info.linkname = member.type, member.mode, size, member.linkname
            if not name and member.isdir():
                continue
            info.pax_headers = {} if name else {SINGLE: "y"}
            taken.addfile(info, given.extractfile(member) if member.isreg() else None)


def _real(api: Any, container: str, path: str, what: str) -> str:
    """Where a link leads, as the engine sees it within the container. An archive of a link would hold the link."""
    chunks, found = asked(api, container, path, what)
    chunks.close()
    return str(found.get("linkTarget") or path)


def changes(api: Any, container: str, workdir: str, pristine: Path | None, max_bytes: int, full: bool) -> list[Change]:
    """How the work directory differs from the pristine tree. `full`: the container has used up its disk.

    Raises SandboxError when it cannot be had by the agent's own doing, EngineLost when by the engine's.
    """
    return fairly(api, container, lambda: _changes(api, container, workdir, pristine, max_bytes), full)


def _changes(api: Any, container: str, workdir: str, pristine: Path | None, max_bytes: int) -> list[Change]:
    what = f"what the agent left in {workdir}"
    tree = list(pristine.rglob("*")) if pristine else []
    whole = sum(path.lstat().st_size + 2048 for path in tree)
    gone = {str(path.relative_to(pristine)) for path in tree} if pristine else set()
    found: dict[str, Change] = {}
    left, most = max_bytes, MOST + len(tree)
    with opened(api, container, workdir, 2 * whole + 8 * max_bytes, f"{what}, in all,") as tar:
        for member, name in below(tar):
            if not name:
                continue
            if (most := most - 1) < 0:
                raise SandboxError(f"{what} has more files and directories than a diff can hold")
            if len(name) > _LONGEST or name.count("/") > DEEPEST:
                raise SandboxError(f"{what} is nested too deep to be copied")
            before = original(pristine, name) if pristine else Change(name, "deleted")
            if member.isreg() and member.size != len(before.data) and member.size > left:
                raise SandboxError(f"{what} is larger than {max_bytes} bytes")
            change = _change(tar, member, name, found, pristine)
            if change is None:
                continue
            gone.discard(name)
            if change != before:
                found[name] = change
                left -= len(change.data) + tarfile.BLOCKSIZE  # a million empty files are not nothing
            if left < 0:
                raise SandboxError(f"{what} is larger than {max_bytes} bytes")
    found |= {name: Change(name, "deleted") for name in gone if not _goes_along(name, gone, found)}
    return sorted(found.values(), key=lambda change: change.path)


def _goes_along(name: str, gone: set[str], found: dict[str, Change]) -> bool:
    """Whether a directory above is gone too, or is something else now."""
    above = [str(parent) for parent in PurePosixPath(name).parents]
    return any(parent in gone or (parent in found and found[parent].kind != "directory") for parent in above)


def _change(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, found: dict[str, Change], pristine: Path | None) -> Change | None:
    mode = member.mode & 0o7777
    if member.isdir():
        return Change(name, "directory", mode)
    if member.issym():
        return Change(name, "link", data=os.fsencode(member.linkname))
    if member.isreg():
        content = tar.extractfile(member)
        return Change(name, "file", mode, content.read() if content is not None else b"")
    if member.islnk():  # another name of a file that came before
        first = member.linkname.partition("/")[2]
        source = found.get(first) or (original(pristine, first) if pristine else None)
        return Change(name, "file", mode, source.data) if source is not None and source.kind == "file" else None
    return None


def kill(api: Any, container: str) -> None:
    """On return no process of the container exists. One that ended by itself, or is gone, is as good."""
    from docker.errors import APIError

    try:
        api.kill(container, "SIGKILL")
    except APIError as error:
        if error.status_code not in (404, 409):
            raise
    with contextlib.suppress(APIError):
        api.wait(container)


def state(api: Any, container: str) -> dict[str, Any]:
    found: dict[str, Any] = api.inspect_container(container)["State"]
    return found


def ended(api: Any, container: str) -> tuple[dict[str, Any], int]:
    """The container's state, and the bytes in its writable layer."""
    (listed,) = api.containers(all=True, size=True, filters={"id": container}) or [{}]
    return state(api, container), int(listed.get("SizeRw") or 0)


def remove(api: Any, container: str) -> None:
    from docker.errors import APIError

    try:
        api.remove_container(container, force=True, v=True)
    except APIError as error:
        if error.status_code not in (404, 409):  # gone, or about to be
            raise
