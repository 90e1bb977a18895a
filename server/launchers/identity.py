"""Which process is which: a pid is given again, (boot, pid, start time) never is.

Every process of a run carries a marker in its initial environment, `LEGO_RL_PROCESS=<run id>/<role>`, which its descendants inherit. So
what a dead process left behind is found even when it moved to another group or session.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

MARKER = "LEGO_RL_PROCESS"
PROC = Path("/proc")


class Identity(BaseModel):
    """`start_ticks` is field 22 of /proc/PID/stat: clock ticks since the boot named by `boot_id`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    boot_id: str
    pid: int
    start_ticks: int


class OwnedProcess(Identity):
    """One line of processes.jsonl. Each is the leader of its own process group."""

    role: str
    started: float


def identify(pid: int) -> Identity | None:
    """None when there is no such process, or only its zombie."""
    try:
        # The command's name is in parentheses and may itself hold any character.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Identity(boot_id=_boot_id(), pid=pid, start_ticks=int(fields[19]))


def is_alive(process: Identity) -> bool:
    now = identify(process.pid)
    return now is not None and (now.boot_id, now.start_ticks) == (process.boot_id, process.start_ticks)


def send(process: Identity, number: signal.Signals, *, group: bool = False) -> bool:
    """Signal this process, or the group it leads. False, and nothing is signalled, when it is gone."""
    with _opened(process.pid) as pidfd:
        if pidfd is None or not is_alive(process):
            return False
        try:
            if group:
                os.killpg(process.pid, number)  # while its leader is held open, the group's number belongs to it
            else:
                signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        return True


def kill_marked(marker: str) -> int:
    """Kill every process whose marker is `marker` or begins with `marker/`, but not the caller. Returns how many there were."""
    killed = 0
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with _opened(int(entry.name)) as pidfd:
            if pidfd is not None and _is_marked(entry, marker):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    killed += 1
    return killed


def _is_marked(entry: Path, marker: str) -> bool:
    try:
        variables = (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return False
    own = f"{MARKER}={marker}".encode()
    return any(variable == own or variable.startswith(own + b"/") for variable in variables)


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int | None]:
    """A pidfd: it names this process even if the pid is given again."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()
