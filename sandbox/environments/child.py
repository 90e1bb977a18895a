"""The way of a new process in a sandbox to the command that it is for.

Imported by what starts processes there, or sent along as text (`program`): nothing but the standard library, and nothing is imported after
the root directory or the user has changed.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

_CAUGHT = (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE)
_OPEN_FILES = 4096


def end_with(body: Callable[[], object], refused: Callable[[OSError], object] = lambda error: None) -> NoReturn:
    """Do `body` and end, whatever happens: with status 126 and a line for a failure. `refused` hears of an OSError first."""
    try:
        body()
        os._exit(0)
    except OSError as error:
        refused(error)
        os.write(2, f"{error.strerror}: {error.filename or ''}\n".encode())
    except BaseException as error:  # noqa: BLE001 -- this child must end here, whatever happens
        os.write(2, f"{error!r}\n".encode())
    os._exit(126)


def take(fds: Sequence[int]) -> None:
    """A session of its own, `fds` as descriptors from 0 on and no others, and signals as a new program expects them.

    A command gets the first three only.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    for caught in _CAUGHT:
        signal.signal(caught, signal.SIG_DFL)
    for number, fd in enumerate([os.dup(fd) for fd in fds]):
        os.dup2(fd, number, inheritable=number < 3)
    os.closerange(len(fds), _OPEN_FILES)


def set_limits(limits: Mapping[str, int]) -> None:
    """Resource limits by the names of the `resource` module without `RLIMIT_`, as (n, n) or lower where the hard limit is lower."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, soft))


def execute(argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """`execve` by PATH; the library's `execvpe` would import a module from the sandbox's own files.

    Raises OSError where there is no room for one more process; every other failure ends this one, as a shell would (126, 127).
    """
    name = argv[0]
    failure: OSError = FileNotFoundError(errno.ENOENT, "No such file or directory")
    for directory in [""] if "/" in name else env.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            os.execve(f"{directory}/{name}" if directory else name, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = error
    if failure.errno == errno.EAGAIN:
        raise failure
    os.write(2, f"{name}: {failure.strerror}\n".encode())
    os._exit(127 if isinstance(failure, FileNotFoundError) else 126)
