"""A forked child of another process lands in the sandbox with the same confinement as everything else there."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable

import pytest

from sandbox.environments.namespace.enter import ForkTarget, fork_into
from sandbox.environments.namespace.sandbox import Sandbox
from sandbox.environments.spec import RoMount, SandboxSpec
from sandbox.redteam.ordinary import REPOSITORY
from tests.sandbox.environments.contract import LIMITS, NAMESPACES, Place, contract
from tests.sandbox.environments.test_contract import processes, until

# A warm parent has one thread; pytest and asyncio here have more.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


async def run_inside(sandbox: Sandbox, body: Callable[[], None], import_path: tuple[str, ...] = ()) -> tuple[int, str]:
    """Fork `body` into the sandbox by way of a socket, as a warm parent gets its target; exit code and output."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent = await sandbox.fork_target()
    sent.send(ours)
    sent.close()
    target = ForkTarget.receive(theirs)
    reader, writer = os.pipe()
    with open(os.devnull, "rb") as null:
        pid = fork_into(target, (null.fileno(), writer, writer), import_path)
        if pid == 0:
            try:
                body()
                sys.stdout.flush()
                os._exit(7)
            except BaseException as error:  # noqa: BLE001 -- this process must end here
                os.write(2, repr(error).encode())
            os._exit(1)
    target.close()
    os.close(writer)
    ours.close()
    theirs.close()

    def finish() -> tuple[int, str]:
        with os.fdopen(reader) as file:
            text = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text

    return await asyncio.to_thread(finish)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


@contract(on=NAMESPACES)
async def test_a_forked_child_is_confined(place: Place) -> None:
    # The child is a fork of this whole test process, whose memory counts against an rlimit from the first moment.
    roomy = LIMITS.model_copy(update={"memory_mb": 16_384})
    tree = place.tree(a_py="pristine")
    sandbox = await place.sandbox(SandboxSpec(workspace=tree, limits=roomy))

    def body() -> None:
        say(os.getuid(), os.getcwd(), sorted(os.listdir()), os.path.exists(place.root))
        with open("/proc/self/status") as file:
            say([line.split()[1] for line in file if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:"))])
        say(len(os.listdir("/proc/self/fd")), socket.socket().connect_ex(("192.0.2.1", 80)))
        with open("written", "w") as file:
            file.write("by the child")
        os.system("sleep 4731.25 > /dev/null 2>&1 & id -un; ls /proc | grep -c '^[0-9]'")  # noqa: S605

    code, text = await run_inside(sandbox, body)
    assert code == 7, text
    assert text.splitlines()[:4] == [
        f"{sandbox.uid} /workspace ['a.py'] False",
        "['0000000000000000', '0000000000000000', '1', '2']",
        "4 101",
        "agent",
    ]
    assert (await sandbox.exec("cat written")).stdout == b"by the child"
    await until(lambda: bool(processes("sleep 4731.25")))
    await sandbox.kill()
    assert not processes("sleep 4731.25")


@contract(on=NAMESPACES)
async def test_imports_come_from_the_named_directories_only(place: Place) -> None:
    runtime = place.tree(harness__tool_py="NAME = 'runtime'")
    standard = sysconfig.get_path("stdlib")
    spec = SandboxSpec(
        workspace=place.tree(colorsys_py="raise SystemExit('the agent was imported')"), mounts=(RoMount(runtime),), limits=LIMITS
    )
    sandbox = await place.sandbox(spec)

    def body() -> None:
        import colorsys

        import harness.tool  # type: ignore[import-not-found]

        say(harness.tool.NAME, colorsys.__file__)

    code, text = await run_inside(sandbox, body, (standard, f"{standard}/lib-dynload", str(runtime)))
    assert (code, text) == (7, f"runtime {standard}/colorsys.py\n")


@contract(on=NAMESPACES)
async def test_the_wait_status_is_the_childs_own(place: Place) -> None:
    sandbox = await place.sandbox()
    assert await run_inside(sandbox, lambda: os._exit(3)) == (3, "")
    assert (await run_inside(sandbox, lambda: os.kill(os.getpid(), 15)))[0] in (-15, 7)  # process 2 of a namespace: the signal counts
    hold = asyncio.create_task(run_inside(sandbox, lambda: os.execv("/bin/sleep", ["sleep", "4732.25"])))  # noqa: S606
    await until(lambda: bool(processes("sleep 4732.25")))
    await sandbox.kill()
    assert (await hold)[0] == -9


@contract(on=NAMESPACES)
async def test_a_sandbox_that_is_gone_cannot_be_entered(place: Place) -> None:
    sandbox = await place.sandbox()
    target = await sandbox.fork_target()
    await sandbox.destroy()
    reader, writer = os.pipe()
    try:
        pid = fork_into(target, (writer, writer, writer))
    except OSError:
        return
    finally:
        os.close(writer)
        target.close()
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 126
    assert os.read(reader, 4096).startswith(b"cannot enter the sandbox: ")


def test_receiving_from_a_closed_connection() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs, pytest.raises(ConnectionError):
        ForkTarget.receive(theirs)


def test_the_modules_that_run_with_privileges_stay_small() -> None:
    """What the spawner and a warm parent load must not pull in asyncio, pydantic or the rest of the product."""
    code = "import sys; from sandbox.environments.namespace import enter, spawner; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "sandbox" in loaded
    assert not loaded & {"asyncio", "pydantic", "harbor", "server", "subprocess"}
