"""A root directory made from the layers of an image, before any program of the image runs.

The image is untrusted. Nothing here follows a link of it: behind one lies the host.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat

from . import kernel
from .confine import Identity

_MOUNT_DATA = 4096
"""What mount(2) takes of options, in bytes with the closing zero."""
_FRESH = ("dev", "sys")
_NEEDED = ("/proc", "/run", "/tmp", "/var/tmp", "/home", "/etc")
_USERS_BYTES = 1 << 20


def stack(store: str, layers: list[str], rootless: bool) -> str:
    """Mount an overlay of `layers`, the topmost first, with `{store}/root` as upper layer; returns the mount point."""
    target, work = f"{store}/stack", f"{store}/rootwork"
    for path in (target, work):
        os.mkdir(path)
    base = os.path.commonpath([os.path.dirname(layer) for layer in layers])
    os.chdir(base)  # names relative to it are short
    lower = ":".join(_escaped(os.path.relpath(layer, base)) for layer in layers)
    options = f"lowerdir={lower},upperdir={store}/root,workdir={work}" + (",userxattr" if rootless else ",redirect_dir=off,metacopy=off")
    if len(options) >= _MOUNT_DATA:
        raise OSError(errno.E2BIG, f"{len(layers)} layers are more than one mount takes: use an image with fewer")
    kernel.mount("overlay", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    os.chdir("/")
    return target


def prepare(store: str, root: str, agent: Identity, emptied: list[str]) -> None:
    """Give the image what every sandbox has: mount points, users, no name service, and nothing in the directories `emptied`."""
    for name in _FRESH:
        fresh = f"{store}/{name}"
        os.mkdir(fresh)
        os.makedirs(inside(root, f"/{name}"), exist_ok=True)
        kernel.bind(fresh, f"{root}/{name}", kernel.ATTR_NOSUID, recursive=False)
    for path in _NEEDED:
        os.makedirs(inside(root, path), exist_ok=True)
    for path in emptied:
        if os.path.lexists(place := inside(root, path)):
            shutil.rmtree(place)
    user = f"agent:x:{agent.uid}:{agent.gid}::/home/agent:"
    shell = "/bin/bash" if os.path.lexists(f"{root}/bin/bash") else "/bin/sh"
    _replace(root, "/etc/passwd", _without(_text(root, "/etc/passwd"), agent.uid) + f"{user}{shell}\n")
    _replace(root, "/etc/group", _without(_text(root, "/etc/group"), agent.gid) + f"agent:x:{agent.gid}:\n")
    _replace(root, "/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    _replace(root, "/etc/resolv.conf", "")


def inside(root: str, path: str) -> str:
    """The place of a sandbox path before the root has changed: a link on the way would lead out to the host."""
    place = root + path
    if os.path.realpath(place) != place:
        raise OSError(errno.ELOOP, f"{path} leads through a link in the sandbox: name the place itself")
    return place


def reachable(root: str, path: str) -> str:
    """`inside`, with every directory above it open to the agent: images keep /root to root."""
    place = inside(root, path)
    for parent in _parents(root, path):
        if os.path.isdir(parent) and not stat.S_IMODE(mode := os.stat(parent).st_mode) & 0o001:
            os.chmod(parent, stat.S_IMODE(mode) | 0o011)  # noqa: S103 -- in this sandbox only
    return place


def _parents(root: str, path: str) -> list[str]:
    parts = path.strip("/").split("/")[:-1]
    return [f"{root}/{'/'.join(parts[: number + 1])}" for number in range(len(parts))]


def _escaped(path: str) -> str:
    for character in "\\:,":
        path = path.replace(character, f"\\{character}")
    return path


def _text(root: str, path: str) -> str:
    """A regular file of the image, or nothing."""
    try:
        fd = os.open(inside(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        return file.read(_USERS_BYTES).decode(errors="replace") if stat.S_ISREG(os.fstat(fd).st_mode) else ""


def _without(text: str, number: int) -> str:
    """Lines of /etc/passwd or /etc/group that claim neither the agent's name nor its id."""
    rows = [line for line in text.splitlines() if line.count(":") >= 2]
    return "".join(f"{line}\n" for line in rows if line.split(":")[0] != "agent" and line.split(":")[2] != str(number))


def _replace(root: str, path: str, text: str) -> None:
    place = root + path
    inside(root, os.path.dirname(path))
    if os.path.lexists(place):
        os.unlink(place)
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
