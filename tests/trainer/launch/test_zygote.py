"""The warm fork's mechanism with small programs; that Ray's workers live on it is shown by the whole runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.launch import stand_in, zygote

PARENT = """
import sys, importlib
from pathlib import Path
from trainer.launch import zygote
import ray._raylet, numpy
ray._raylet.UniqueID.from_random()   # so that the forks share the generator's state
parent = zygote.start(Path(sys.argv[1]))
print(parent.executable, flush=True)
sys.stdin.read()
parent.stop()
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The stand-in of a live zygote."""
    command = [sys.executable, "-c", PARENT, str(tmp_path_factory.mktemp("zygote"))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None and parent.stdin is not None
    yield Path(parent.stdout.readline().strip())
    parent.stdin.close()
    assert parent.wait(timeout=120) == 0


def worker(tmp_path: Path, source: str) -> Path:
    """A program with the name of Ray's worker script."""
    path = tmp_path / "default_worker.py"
    path.write_text(textwrap.dedent(source))
    return path


def run(interpreter: Path, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(interpreter), *args], capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


def test_a_worker_is_a_fork_with_its_own_arguments_environment_and_exit_code(interpreter: Path, tmp_path: Path) -> None:
    program = worker(
        tmp_path,
        """
        import os, sys
        print("numpy" in sys.modules, sys.argv[1:], os.environ["COLOUR"], os.getcwd(), "HOME" in os.environ)
        print("to stderr", file=sys.stderr)
        sys.exit(7)
        """,
    )
    done = run(interpreter, "-u", str(program), "--x=1", "two", cwd=tmp_path, env={"COLOUR": "blue"})
    assert done.stdout == f"True ['--x=1', 'two'] blue {tmp_path} False\n"
    assert done.stderr == "to stderr\n"
    assert done.returncode == 7


def test_other_programs_get_the_real_interpreter(interpreter: Path) -> None:
    done = run(interpreter, "-c", "import sys; print('numpy' in sys.modules, sys.flags.isolated)")
    assert done.stdout == "False 0\n"


def test_forks_draw_different_ids(interpreter: Path, tmp_path: Path) -> None:
    program = worker(tmp_path, "import ray._raylet, random; print(ray._raylet.UniqueID.from_random().hex(), random.random())")
    drawn = [run(interpreter, str(program)).stdout.split() for _ in range(4)]
    assert len({ids for ids, _ in drawn}) == len({number for _, number in drawn}) == 4


def test_killing_the_stand_in_ends_the_fork(interpreter: Path, tmp_path: Path) -> None:
    program = worker(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    asked = subprocess.Popen([str(interpreter), str(program)], stdout=subprocess.PIPE, text=True)
    assert asked.stdout is not None
    assert int(asked.stdout.readline()) != asked.pid
    asked.send_signal(signal.SIGKILL)
    asked.wait()
    assert asked.stdout.read() == ""  # the pipe ends when its last holder, the fork, is gone


def test_the_runtime_environment_is_applied_without_rays_setup_step() -> None:
    before = dict(os.environ)
    try:
        program = stand_in._program(
            [
                "/ray/setup_worker.py",
                '--serialized-runtime-env-context={"env_vars": {"A_SETTING": "on"}}',
                "--language=PYTHON",
                "/ray/default_worker.py",
                "--node-id=1",
            ]
        )
        assert program == ["/ray/default_worker.py", "--node-id=1"]
        assert os.environ["A_SETTING"] == "on"
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_command_prefix_is_left_to_ray() -> None:
    args = ["setup_worker.py", '--serialized-runtime-env-context={"command_prefix": ["numactl"]}', "default_worker.py"]
    assert stand_in._program(args) is None


def test_this_environment_has_what_warm_fork_needs() -> None:
    assert zygote.obstacle() is None


def test_another_ray_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "RAY_VERSION", "1.0")
    assert "checked with ray 1.0, not" in str(zygote.obstacle())
