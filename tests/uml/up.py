"""`python -m tests.uml.up COMMAND …`: run a command under a kernel of its own, User-Mode Linux 6.1 of Debian 12, and leave nothing behind.

It has version 2 of cgroups alone, and sees the files of this machine but for `/tmp`, `/run` and what kernels make. It is a program like any
other: its processes are threads that it traces, in a process namespace that ends with it. A program starts in about fifty milliseconds
there, on one CPU, so take few tests along.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.build import apt, run

_PACKAGES = ("user-mode-linux", "xfsprogs", "libinih1", "liburcu8")
_MEMORY = "3G"
_PLACE = {"TMPDIR": "/dev/shm"}  # noqa: S108 -- of its memory: a file without a name
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lego-rl-tests" / "uml"


def programs(cache: Path) -> Path:
    """The directory that holds the unpacked packages. Raises SystemExit that says what this machine lacks."""
    tools = cache / "tools"
    if (tools / "usr/bin/linux.uml").is_file():
        return tools
    if shutil.which("apt-get") is None:
        sys.exit("User-Mode Linux is taken from Debian's packages: this needs Debian 12")
    cache.mkdir(parents=True, exist_ok=True)
    env = apt(cache)
    packages, unfinished = cache / "debs", cache / "tools.unfinished"
    for path in (packages, unfinished):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    run(["apt-get", "download", "-qq", *_PACKAGES], packages, env)
    for package in sorted(packages.glob("*.deb")):
        run(["dpkg", "-x", str(package), str(unfinished)], packages, env)
    shutil.rmtree(packages)
    unfinished.rename(tools)
    return tools


def main(command: list[str]) -> int:
    if os.geteuid() != 0 or not command:
        sys.exit("usage: python -m tests.uml.up COMMAND …, as root")
    cache = default_cache()
    tools = programs(cache)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = cache / "state"
        shutil.rmtree(state, ignore_errors=True)  # of one that was killed
        state.mkdir(mode=0o700)
        try:
            return _boot(tools, state, command)
        finally:
            shutil.rmtree(state)


def _boot(tools: Path, state: Path, command: list[str]) -> int:
    init = state / "init"
    words = " ".join(_quoted(word) for word in (sys.executable, "-m", "tests.uml.inside", str(tools), str(state), *command))
    init.write_text(
        f"#!/bin/sh\ncd {_quoted(str(Path.cwd()))}\nPYTHONDONTWRITEBYTECODE=1 PATH={_quoted(os.environ['PATH'])} exec {words}\n"
    )
    init.chmod(0o755)
    output, console = state / "output", state / "console"
    output.touch()
    kernel = [str(tools / "usr/bin/linux.uml"), f"mem={_MEMORY}", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}"]
    kernel += ["con=null", "con0=null,fd:1", "quiet", f"uml_dir={state}"]
    with console.open("wb") as log, output.open("rb") as said:
        guest = subprocess.Popen([*_NAMESPACES, *kernel], env=os.environ | _PLACE, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        signal.signal(signal.SIGTERM, lambda *_: guest.kill())
        try:
            while guest.poll() is None:
                _pass_on(said.read())
                time.sleep(0.2)
            _pass_on(said.read())
        finally:
            guest.kill()
            guest.wait()
    status = state / "status"
    if not status.is_file():
        print("uml: the kernel ended before the command did\n" + console.read_text(errors="replace")[-2000:], file=sys.stderr)
        return 1
    return int(status.read_text())


def _pass_on(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
