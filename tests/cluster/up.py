"""`python -m tests.cluster.up COMMAND …`: run a command beside a real one-node Kubernetes cluster, and leave nothing behind.

The cluster and the command live in mount, network and process namespaces of their own. The command finds the cluster by the environment
variable KUBECONFIG, as Kubernetes' own tools do. When it ends, or this program is ended, however, the kernel kills all that is in there.
A kubelet changes settings of the kernel that no namespace holds: it gets to see copies, and the real ones are compared and put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sandbox.environments.namespace import kernel

from .build import default_cache, programs
from .node import serve

SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_CGROUPS = Path("/sys/fs/cgroup")


def main(command: list[str]) -> int:
    if os.geteuid() != 0 or not command:
        sys.exit("usage: python -m tests.cluster.up COMMAND …, as root")
    if missing := [name for name in ("ip", "mount", "openssl", "skopeo") if shutil.which(name) is None]:
        sys.exit(f"the cluster needs {', '.join(missing)}: apt-get install iproute2 mount openssl skopeo")
    cache = default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = programs(cache)
        before, groups = settings(), cgroups()
        state = cache / "state"
        shutil.rmtree(state, ignore_errors=True)  # of one that was killed
        state.mkdir(mode=0o700)
        child = _in_namespaces(lambda: serve(found, state, before, command))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _end(child))
        try:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            restore(before)
            for group in sorted(cgroups() - groups, reverse=True):
                group.rmdir()
            shutil.rmtree(state)


def _in_namespaces(body: object) -> int:
    """Fork; the grandchild is process 1 of the new namespaces and runs `body` in one more. Both die with their parent."""
    pid = os.fork()
    if pid:
        return pid
    kernel.die_with_parent()
    kernel.unshare(kernel.NEWNS | kernel.NEWNET | kernel.NEWPID)
    init = os.fork()
    if init:
        _exit_like(os.waitpid(init, 0)[1])
    kernel.die_with_parent()
    worker = os.fork()
    if worker == 0:
        status = 1
        try:
            status = body()  # type: ignore[operator]
        finally:
            sys.stdout.flush()
            os._exit(status)
    while True:  # containers' supervisors become children of process 1
        ended, status = os.wait()
        if ended == worker:
            _exit_like(status)


def _exit_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _end(child: int) -> object:
    def handler(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
            os.kill(child, signal.SIGKILL)

    return handler


def settings() -> dict[str, str]:
    return {name: path.read_text() for name in SETTINGS if (path := Path("/proc/sys", name)).is_file()}


def restore(before: dict[str, str]) -> None:
    for name, value in settings().items():
        if value != before[name]:
            print(f"cluster: {name} was {value.strip()}; put back to {before[name].strip()}", file=sys.stderr)
            Path("/proc/sys", name).write_text(before[name])


def cgroups() -> set[Path]:
    """Groups that containerd and a kubelet make at the top of every hierarchy."""
    return {
        path for name in ("k8s.io", "kubepods") for top in _CGROUPS.glob(f"*/{name}") for path in (top, *top.rglob("*")) if path.is_dir()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
