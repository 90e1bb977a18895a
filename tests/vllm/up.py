"""`python -m tests.vllm.up ARGUMENT …`: run Python with these arguments in an environment that has vLLM's CPU build.

The environment is made once, in the user's cache directory, from the pins beside this file. Where it cannot be made, the reason is
printed as SKIPPED and nothing runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PINS = (HERE / "requirements.txt", HERE / "named" / "pyproject.toml")
CHECK = "import vllm._C, vllm.platforms as platforms; assert platforms.current_platform.is_cpu()"


class CannotBuild(Exception):
    """The message says why."""


def environment(cache: Path) -> Path:
    """The interpreter of the environment for today's pins and this checkout. Raises CannotBuild."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotBuild(f"the pins are those of Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in PINS)).hexdigest()[:12]
    home = cache / f"vllm-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "vllm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python, ready = home / "bin" / "python", home / "ready"
        if not ready.exists():
            shutil.rmtree(home, ignore_errors=True)
            _uv("venv", "--python", sys.executable, str(home))
            _uv("pip", "install", "--python", str(python), "--no-deps", "-r", str(PINS[0]), str(PINS[1].parent))
            _run([str(python), "-c", CHECK], "vLLM was installed but does not start")
            ready.touch()
        _uv("pip", "install", "--python", str(python), "--no-deps", "--editable", str(HERE.parents[1]))  # vLLM finds plug-ins by metadata
    return python


def _uv(*arguments: str) -> None:
    _run([sys.executable, "-m", "uv", "--quiet", "--system-certs", *arguments], f"`uv {' '.join(arguments[:2])}` failed")


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{failure}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")


def main(arguments: list[str]) -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lego-rl-tests"
    try:
        python = environment(cache)
    except CannotBuild as error:
        print(f"SKIPPED: the tests on vLLM, because its environment cannot be made: {error}")
        return 0
    os.execv(python, [str(python), *arguments])  # noqa: S606 in place of this process, so that signals arrive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
