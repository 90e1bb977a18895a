"""The file system that a sandbox sees, built inside its new mount namespace.

One tmpfs of limited size holds all that a sandbox can write: root directory, /tmp, home and the upper layer of the work directory.
Everything else is a read-only mount of a whitelisted host directory, or comes from an image, whose layers lie below an overlay with its
upper layer in that tmpfs. The work directory is an overlay over the pristine tree, whose
files appear as the agent's own (identity-mapped mount; a copy where the file system cannot do that).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import image, kernel
from .confine import Identity

_READ_ONLY = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
_PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_PROC_MASKED = ("kcore", "keys", "timer_list", "kallsyms", "config.gz", "kmsg", "scsi", "acpi")
_ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "alternatives", "localtime", "mime.types", "magic", "inputrc"),
    *("ssl/certs", "ssl/openssl.cnf", "terminfo", "bash.bashrc", "profile", "java-17-openjdk", "protocols", "services", "os-release"),
)


@dataclass(frozen=True)
class Plan:
    """What to build. `store` is the sandbox's tmpfs as the spawner sees it; `etc` the filtered copy of /etc."""

    store: str
    etc: str
    agent: Identity
    rootless: bool
    workdir: str
    workspace: str | None
    workspace_map: int | None
    """Descriptor of the user namespace that maps the pristine tree's owner to the agent."""
    mounts: list[tuple[str, str]]
    directories: list[tuple[str, str, int]]
    """(path, `agent` or `root`, mode) of further directories."""
    layers: list[str]
    """Directories of the image, the topmost first; empty for the host's programs."""


def build_etc(target: str) -> None:
    """Copy what programs need of /etc: nothing that identifies users or the host."""
    for name in _ETC:
        _copy(f"/etc/{name}", f"{target}/{name}")
    for name, text in (("passwd", ""), ("group", ""), ("hosts", "127.0.0.1 localhost\n::1 localhost\n"), ("resolv.conf", "")):
        _write(f"{target}/{name}", text)


def build(plan: Plan) -> None:
    """Assemble the tree at `{store}/root` and make it the root directory of the calling process."""
    root = f"{plan.store}/root"
    if plan.layers:
        root = image.stack(plan.store, plan.layers, plan.rootless)
        image.prepare(plan.store, root, plan.agent, [path for path, _, _ in plan.directories])
    else:
        kernel.bind(root, root, kernel.ATTR_NOSUID | kernel.ATTR_NODEV, recursive=False)
        _host_programs(plan, root)
    for source, target in plan.mounts:
        if not _in_workspace(plan, target):
            _mount_read_only(source, image.reachable(root, target))
    _devices(root)
    _proc(root)
    _directories(plan, root)
    _workspace(plan, image.inside(root, plan.workdir))
    for source, target in plan.mounts:
        if _in_workspace(plan, target):
            _bind_as_agent(plan, source, image.inside(root, target))
    kernel.pivot(root)


def _host_programs(plan: Plan, root: str) -> None:
    for name in ("usr", "etc", "proc", "dev", "sys", "run", "root", "home", "opt", "var", "var/tmp", "tmp"):
        os.mkdir(f"{root}/{name}")
    os.symlink("../run", f"{root}/var/run")
    kernel.bind("/usr", f"{root}/usr", _READ_ONLY)
    for name in _PROGRAMS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            _mount_read_only(f"/{name}", f"{root}/{name}")
    users = f"{plan.store}/users"
    agent = plan.agent
    os.mkdir(users)
    _write(
        f"{users}/passwd",
        f"root:x:0:0:root:/root:/bin/sh\nagent:x:{agent.uid}:{agent.gid}::/home/agent:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    )
    _write(f"{users}/group", f"root:x:0:\nagent:x:{agent.gid}:\nnogroup:x:65534:\n")
    kernel.bind(plan.etc, f"{root}/etc", _READ_ONLY)
    for name in ("passwd", "group"):
        kernel.bind(f"{users}/{name}", f"{root}/etc/{name}", _READ_ONLY)


def _in_workspace(plan: Plan, target: str) -> bool:
    """Such a mount comes after the work directory, at a place that exists there."""
    return target.startswith(f"{plan.workdir}/")


def _mount_read_only(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.isfile(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    kernel.bind(source, target, _READ_ONLY)


def _devices(root: str) -> None:
    for name in _DEVICES:
        _write(f"{root}/dev/{name}", "")
        kernel.bind(f"/dev/{name}", f"{root}/dev/{name}", kernel.ATTR_NOSUID)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/pts")
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def _proc(root: str) -> None:
    proc = f"{root}/proc"
    kernel.mount("proc", proc, "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, "hidepid=invisible")
    for name in _PROC_READ_ONLY:
        if os.path.exists(f"{proc}/{name}"):
            kernel.bind(f"{proc}/{name}", f"{proc}/{name}", _READ_ONLY)
    for name in _PROC_MASKED:
        if os.path.isdir(f"{proc}/{name}"):
            kernel.bind(f"{root}/sys", f"{proc}/{name}", _READ_ONLY)
        elif os.path.exists(f"{proc}/{name}"):
            kernel.bind("/dev/null", f"{proc}/{name}", kernel.ATTR_RDONLY)


def _directories(plan: Plan, root: str) -> None:
    wanted = [("/tmp", "root", 0o1777), ("/var/tmp", "root", 0o1777), ("/dev/shm", "root", 0o1777), ("/home/agent", "agent", 0o700)]
    for path, owner, mode in [*wanted, *plan.directories]:
        place = image.inside(root, path)
        os.makedirs(place, exist_ok=True)
        os.chmod(place, mode)
        if owner == "agent" and not plan.rootless:
            os.chown(place, plan.agent.uid, plan.agent.gid)


def _workspace(plan: Plan, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    upper, work, lower = f"{plan.store}/upper", f"{plan.store}/work", f"{plan.store}/lower"
    for path in (upper, work, lower):
        os.mkdir(path)
    if not plan.rootless:
        os.chown(upper, plan.agent.uid, plan.agent.gid)
    if plan.workspace is not None:
        _pristine(plan, plan.workspace, lower)
    elif plan.layers:
        lower = target
    options = f"lowerdir={lower},upperdir={upper},workdir={work}" + (",userxattr" if plan.rootless else ",redirect_dir=off,metacopy=off")
    kernel.mount("overlay", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _pristine(plan: Plan, workspace: str, lower: str) -> None:
    if plan.rootless and os.stat(workspace).st_uid == plan.agent.uid:
        kernel.bind(workspace, lower, _READ_ONLY, recursive=False)
        return
    if plan.workspace_map is not None:
        try:
            kernel.bind(workspace, lower, _READ_ONLY | kernel.ATTR_IDMAP, plan.workspace_map, recursive=False)
        except OSError:
            pass  # this file system has no identity mapping
        else:
            return
    _copy(workspace, lower, None if plan.rootless else plan.agent)


def _bind_as_agent(plan: Plan, source: str, target: str) -> None:
    """Read-only, with the agent as owner like the tree around it where the file system can do that."""
    if plan.workspace_map is not None:
        try:
            kernel.bind(source, target, _READ_ONLY | kernel.ATTR_IDMAP, plan.workspace_map, recursive=False)
        except OSError:
            pass  # this file system has no identity mapping
        else:
            return
    kernel.bind(source, target, _READ_ONLY, recursive=False)


def _copy(source: str, target: str, owner: Identity | None = None) -> None:
    """Copy files, links and directories with their modes; what does not exist or is something else is left out."""
    if os.path.islink(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
        for entry in os.scandir(source):
            _copy(entry.path, f"{target}/{entry.name}", owner)
        os.chmod(target, os.stat(source).st_mode & 0o7777)
    elif os.path.isfile(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(source, "rb") as reader, open(target, "wb") as writer:
            while block := reader.read(1 << 20):
                writer.write(block)
            os.fchmod(writer.fileno(), os.fstat(reader.fileno()).st_mode & 0o7777)
    else:
        return
    if owner is not None:
        os.chown(target, owner.uid, owner.gid, follow_symlinks=False)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
