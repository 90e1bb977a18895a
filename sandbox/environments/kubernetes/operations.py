"""What the host asks of a pod beside commands. Runs there, see `supervise.py`; uses nothing but the standard library.

`CHILDREN` run as a child with pipes, `ANSWERS` at once with a JSON answer.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
Become = Callable[[Request], None]
NEW = ["missing", 0, 0, ""]
"""What the pristine tree has where it has nothing."""


# ---------------------------------------------------------------- files


def pack(request: Request, tools: dict[str, Any]) -> None:
    with open(1, "wb", buffering=1 << 18) as output:
        tools["pack"](request["path"], output)
    os._exit(0)


def unpack(request: Request, tools: dict[str, Any]) -> None:
    with open(0, "rb", buffering=1 << 18) as source:
        tools["unpack"](request["path"], source)
    os._exit(0)


def collect(request: Request, tools: dict[str, Any]) -> None:
    """What differs from the pristine tree, as `transfer.pack` would write the upper layer of an overlay.

    Standard input has the pristine tree's manifest, see `describe`. What is missing is named once, at its topmost.
    """
    import tarfile

    top = request["path"]
    with open(0, "rb") as source:
        pristine: dict[str, list[Any]] = json.load(source)
    kinds: dict[str, str] = {}
    with open(1, "wb", buffering=1 << 18) as output, tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, path, status in tools["walk"](top, frozenset(request["left_out"]), tools["MOST"] + len(pristine)):
            found = describe(path, status, pristine.get(name, NEW))
            kinds[name] = found[0]
            if found == pristine.get(name) or found[0] == "other":
                continue
            info = tarfile.TarInfo(name)
            info.mode, info.size = found[1], found[2]
            if found[0] == "file":
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                    tar.addfile(info, file)
                continue
            info.type = tarfile.DIRTYPE if found[0] == "directory" else tarfile.SYMTYPE
            info.linkname = found[3] if found[0] == "link" else ""
            tar.addfile(info)
        for name in sorted(name for name in pristine if kinds.get(name, "other") == "other"):
            parent = os.path.dirname(name)
            if not parent or kinds.get(parent) == "directory":
                info = tarfile.TarInfo(name)
                info.pax_headers = {tools["WHITEOUT"]: "y"}
                tar.addfile(info)
    os._exit(0)


def manifest(request: Request, tools: dict[str, Any]) -> None:
    """What `collect` needs to know of a tree that only the image has, and no agent yet."""
    with open(1, "w") as output:
        found = tools["walk"](request["path"], most=sys.maxsize)
        json.dump({name: describe(path, status) for name, path, status in found}, output)
    os._exit(0)


def describe(path: str, status: os.stat_result, known: list[Any] | None = None) -> list[Any]:
    """[kind, mode, size, SHA-256 or link target]. A file that has not even the size of `known` is not read for it."""
    mode = status.st_mode & 0o7777
    if stat.S_ISDIR(status.st_mode):
        return ["directory", mode, 0, ""]
    if stat.S_ISLNK(status.st_mode):
        return ["link", 0, 0, os.readlink(path)]
    if not stat.S_ISREG(status.st_mode):
        return ["other", mode, 0, ""]
    if known is not None and (known[0] != "file" or known[2] != status.st_size):
        return ["file", mode, status.st_size, ""]
    import hashlib

    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return ["file", mode, status.st_size, hashlib.file_digest(file, "sha256").hexdigest()]


# ---------------------------------------------------------------- questions


def prepare(request: Request, become: Become) -> dict[str, Any]:
    """Users, directories, ways to what is mounted. Answers which targets that nobody may reach are open, and what bounds processes."""
    uid = request["agent"]
    for path, line in (("/etc/passwd", f"agent:x:{uid}:{uid}::/home/agent:/bin/sh\n"), ("/etc/group", f"agent:x:{uid}:\n")):
        try:
            with open(path, "a") as file:
                file.write(line)
        except OSError:
            continue  # an image that cannot be written to goes without a name for the agent
    for path in request["passed"]:  # an image keeps its /root shut, and a runtime may lie below it
        try:
            os.chmod(path, os.stat(path).st_mode | 0o111)  # noqa: S103 -- passing through shows nothing
        except OSError:
            continue  # an image that cannot be written to has to be right as it is
    for path, owner, mode in request["directories"]:
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
        os.chown(path, uid if owner == "agent" else 0, uid if owner == "agent" else 0)
    return {"open": [target for target in request["closed"] if reaches(target, 0.3)], "pids": pids_limit()}


def reaches(target: list[Any], seconds: float) -> bool:
    try:
        socket.create_connection((target[0], target[1]), seconds).close()
    except OSError:
        return False
    return True


def connect(request: Request, become: Become) -> dict[str, Any]:
    """For every target (address, port, seconds, whether to try again until then) whether it took a connection. All at the same time."""
    import threading

    found = [False] * len(request["targets"])

    def one(number: int, address: str, port: int, seconds: float, patient: bool) -> None:
        end = time.monotonic() + seconds
        while not (answers := reaches([address, port], min(1, seconds))) and patient and time.monotonic() < end:
            time.sleep(0.1)
        found[number] = answers

    threads = [threading.Thread(target=one, args=(number, *target)) for number, target in enumerate(request["targets"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"reached": found}


def crowd(request: Request, become: Become) -> dict[str, Any]:
    """How many of `count` threads the pod has room for beside what runs in it: they count as processes do."""
    import threading

    threading.stack_size(1 << 16)
    end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(request["count"]):
            thread = threading.Thread(target=end.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError:  # that is how Python says that there is no room for one more
        pass
    end.set()
    for thread in threads:
        thread.join()
    return {"room": len(threads)}


def resolve(request: Request, become: Become) -> dict[str, Any]:
    """The names that some server of names answers for."""
    found = []
    for name in request["names"]:
        try:
            socket.getaddrinfo(name, 443)
        except OSError:
            continue
        found.append(name)
    return {"resolved": found}


def kind(request: Request, become: Become) -> dict[str, Any]:
    try:
        mode = os.stat(request["path"]).st_mode
    except OSError:
        return {"kind": "missing"}
    return {"kind": "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"}


def stop(request: Request, become: Become) -> dict[str, Any]:
    """End one command, by the process that watches over it."""
    try:
        with open(f"{request['state']}/{request['target']}") as file:
            os.kill(int(file.read()), signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return {"stopped": False}
    return {"stopped": True}


def kill(request: Request, become: Become) -> dict[str, Any]:
    """SIGKILL to everything but process 1 and ourselves: one system call, which no fork can run away from."""
    counted = usage(request, become)
    left: list[int] = []
    for _ in range(500):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            break
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in (1, os.getpid()) and alive(pid)]
        if not left:
            break
        time.sleep(0.01)
    return counted | {"left": len(left)}


def can_fork(request: Request, become: Become) -> bool:
    """Whether the agent could start one more process now."""
    pid = os.fork()
    if pid == 0:
        try:
            become(request)
        except OSError as error:
            os._exit(1 if error.errno == errno.EAGAIN else 0)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def usage(request: Request, become: Become) -> dict[str, Any]:
    """From the container's own cgroup, version 2 or 1; what cannot be read is 0. Disk counts if the work directory has one of its own."""
    oom = numbers("/sys/fs/cgroup/memory.events") or numbers("/sys/fs/cgroup/memory/memory.oom_control")
    pids = numbers("/sys/fs/cgroup/pids.events") or numbers("/sys/fs/cgroup/pids/pids.events")
    disk = os.statvfs(request["path"])
    own = disk.f_blocks * disk.f_frsize <= 2 * request["disk"]
    return {
        "cpu_s": cpu_used(),
        "memory_peak": number("/sys/fs/cgroup/memory.peak") or number("/sys/fs/cgroup/memory/memory.max_usage_in_bytes"),
        "out_of_memory": oom.get("oom_kill", 0),
        "process_limit_hits": pids.get("max", 0),
        "at_process_limit": not can_fork(request, become),
        "disk_used": (disk.f_blocks - disk.f_bfree) * disk.f_frsize if own else 0,
        # A program that met the full disk may have removed some of its own files since: within a hundredth is full.
        "disk_full": own and (disk.f_bavail * 100 < disk.f_blocks or disk.f_favail * 100 < disk.f_files),
    }


def cpu_used() -> float:
    """Seconds, of all processes of the container that ever were."""
    return numbers("/sys/fs/cgroup/cpu.stat").get("usage_usec", 0) / 1e6 or number("/sys/fs/cgroup/cpuacct/cpuacct.usage") / 1e9


def pids_limit() -> int | None:
    """Of the pod, which only its kubelet can set."""
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        try:
            with open(path) as file:
                return int(file.read())
        except (OSError, ValueError):  # the word `max` too
            continue
    return None


def numbers(path: str) -> dict[str, int]:
    try:
        with open(path) as file:
            return {words[0]: int(words[1]) for words in map(str.split, file) if len(words) == 2}
    except (OSError, ValueError):
        return {}


def number(path: str) -> int:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


CHILDREN = {"pack": pack, "unpack": unpack, "collect": collect, "manifest": manifest}
ANSWERS = {
    "prepare": prepare,
    "connect": connect,
    "crowd": crowd,
    "resolve": resolve,
    "kind": kind,
    "stop": stop,
    "kill": kill,
    "usage": usage,
}
