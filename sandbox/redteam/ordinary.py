"""Run something as an ordinary user, in a process of its own: the attacks and the sandbox's contract hold for both kinds of user."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from sandbox.environments.namespace import kernel

ORDINARY_USER = 12345
REPOSITORY = Path(__file__).parents[2]


def as_ordinary_user(call: Callable[[], object], paths: tuple[Path, ...] = ()) -> None:
    """Run `call` in a forked process of an ordinary user; its failure becomes an AssertionError here. Needs root.

    Descriptors stay open across it. Interpreter, environment, this program and `paths` are reachable even below directories that only
    root may enter.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            _reachable([Path(sys.base_prefix), Path(sys.prefix), REPOSITORY, *paths])
            os.setgroups([])
            os.setresgid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
            os.setresuid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
            kernel.die_with_parent()
            os.chdir("/")
            call()
            status = 0
        except BaseException:  # noqa: BLE001 -- the parent shows it
            os.write(writer, traceback.format_exc().encode()[-30000:])
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text  # noqa: S101


def _reachable(paths: list[Path]) -> None:
    """Let an ordinary user reach paths below directories that only root may enter, in a mount namespace of this process."""
    kernel.unshare(kernel.NEWNS)
    kernel.make_private("/")
    opened = [(path, os.open(path, os.O_PATH)) for path in paths]
    closed = [next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 1), None) for path in paths]
    for parent in dict.fromkeys(parent for parent in closed if parent is not None):
        kernel.mount("tmpfs", str(parent), "tmpfs", 0, "mode=755")
    for path, fd in opened:
        if not path.exists():
            path.mkdir(parents=True)
            kernel.bind(f"/proc/self/fd/{fd}", str(path), 0)
        os.close(fd)
