"""What every sandbox bounds, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from pathlib import Path
from textwrap import indent

import pytest

from sandbox.environments.errors import SandboxError, SandboxLost
from sandbox.environments.spec import RoMount, SandboxSpec
from tests.sandbox.environments.contract import LIMITS, NAMESPACES, Place, contract
from tests.sandbox.environments.test_contract import processes, python, until

FORK_BOMB = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        n += 1
except OSError as error:
    print(n, error.errno)
"""


@contract
async def test_a_fork_bomb_is_bounded(place: Place) -> None:
    sandbox = await place.sandbox()
    count, error = (await python(sandbox, FORK_BOMB)).split()
    assert int(count) < LIMITS.processes
    assert error == "11"
    report = await sandbox.usage()
    assert report.process_limit_hits > 0 or place.host.limits_mode == "rlimit"
    other = await place.sandbox()
    assert (await other.exec("echo unharmed")).stdout == b"unharmed\n"
    await sandbox.kill()
    assert not (await sandbox.usage()).running


@contract
async def test_a_sandbox_full_of_processes_says_so(place: Place) -> None:
    """An agent that leaves no room for another command broke its own sandbox. (Limits of each process leave the host's commands room.)"""
    if place.host.limits_mode == "rlimit":
        return
    sandbox = await place.sandbox()
    bomb = asyncio.create_task(sandbox.exec(["python3", "-c", f"while True:\n{indent(FORK_BOMB, '    ')}\n    time.sleep(0.01)"]))
    with pytest.raises(SandboxError, match="temporarily unavailable"):
        while True:
            await sandbox.exec(["/bin/true"])
    assert (await sandbox.usage()).process_limit_hits > 0
    await sandbox.kill()
    with pytest.raises(SandboxLost):
        await bomb


@contract
async def test_memory_is_bounded(place: Place) -> None:
    sandbox = await place.sandbox()
    result = await sandbox.exec(["python3", "-c", "x = bytearray(b'x') * (1 << 30); print('got it')"])
    assert result.return_code != 0
    assert b"got it" not in result.stdout
    report = await sandbox.usage()
    if place.host.limits_mode == "cgroup":
        assert (result.return_code, report.out_of_memory) == (-9, 1)
        assert report.memory_peak <= LIMITS.memory_mb << 20
    else:
        assert b"MemoryError" in result.stderr
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


@contract(on=NAMESPACES)
async def test_a_full_disk_is_the_agents_own(place: Place) -> None:
    sandbox = await place.sandbox()
    for path in ("/workspace/big", "/tmp/big", "/dev/shm/big", "/home/agent/big"):
        result = await sandbox.exec(f"for i in 1 2 3; do head -c 15000000 /dev/zero > {path}$i; done")
        assert b"No space left on device" in result.stderr, (path, result)
        assert (await sandbox.usage()).disk_full
        await sandbox.exec(f"rm {path}*")
    assert (await sandbox.usage()).disk_used < 1 << 20
    result = await sandbox.exec("i=0; while echo > f$i; do i=$((i+1)); done", timeout_s=60)
    assert b"No space left on device" in result.stderr or b"File too large" in result.stderr


@contract
async def test_cpu_time_is_bounded(place: Place) -> None:
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS.model_copy(update={"cpu_s": 1})))
    if place.host.limits_mode == "cgroup":  # all processes together
        with pytest.raises(SandboxLost):
            await sandbox.exec("for i in 1 2 3 4; do python3 -c 'while True: pass' & done; wait", timeout_s=60)
        await sandbox.kill()
        assert (await sandbox.usage()).cpu_exceeded
        # One process alone, and every command beside it, come to the same end: none seems to have ended by itself.
        sandbox = await place.sandbox(SandboxSpec(limits=LIMITS.model_copy(update={"cpu_s": 1})))
        commands = [["python3", "-c", "while True: pass"], *[["sleep", "1000"]] * 3]
        ends = await asyncio.gather(*(sandbox.exec(command, timeout_s=600) for command in commands), return_exceptions=True)
        assert [type(end) for end in ends] == [SandboxLost] * 4, ends
        await sandbox.kill()
        report = await sandbox.usage()
        assert (report.cpu_exceeded, report.out_of_memory) == (True, 0)
    else:  # each process alone
        result = await sandbox.exec(["python3", "-c", "while True: pass"], timeout_s=60)
        assert not result.timed_out
        assert result.return_code in (-9, -24)  # SIGKILL or SIGXCPU


@contract
async def test_a_limit_that_was_passed_before_anybody_looked_counts(place: Place) -> None:
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS.model_copy(update={"cpu_s": 1})))
    if place.host.limits_mode != "cgroup":
        return
    with contextlib.suppress(SandboxLost):  # who looks first is a matter of chance, and must not matter
        await sandbox.exec(["python3", "-c", "import time\nwhile time.process_time() < 1.1: pass"], timeout_s=60)
    await sandbox.kill()
    assert (await sandbox.usage()).cpu_exceeded


@contract
async def test_open_files_and_file_size_are_bounded(place: Place) -> None:
    sandbox = await place.sandbox()
    assert (await sandbox.exec("ulimit -n; ulimit -Hn; ulimit -f; ulimit -c")).stdout == b"4096\n4096\n16384\n0\n"


# ---------------------------------------------------------------- the end


@contract
async def test_kill_reaches_every_process(place: Place) -> None:
    sandbox = await place.sandbox()
    await sandbox.exec("setsid sh -c '(setsid sleep 4715.25 &)' & trap '' TERM HUP INT; (trap '' TERM; sleep 4715.25) & disown -a")
    code = (
        "import os, signal, time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
    )
    await sandbox.exec(["sh", "-c", 'python3 -c "$1" 4715.25 & echo', "sh", code + "time.sleep(600)"])
    await until(lambda: len(processes("4715.25")) >= 3)
    await sandbox.kill()
    assert processes("4715.25") == []
    with pytest.raises(SandboxLost):
        await sandbox.exec("true")
    await sandbox.destroy()


@contract(on=NAMESPACES)
async def test_nothing_is_left(place: Place) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    cgroups: list[str] = []
    for _ in range(3):
        sandbox = await place.sandbox(SandboxSpec(workspace=place.tree(a_py="x"), limits=LIMITS))
        target = await sandbox.fork_target()
        cgroups += target.cgroups
        target.close()
        await sandbox.exec("touch new; sleep 4716.25 &")
        await sandbox.destroy()
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert processes("4716.25") == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    await until(lambda: not any(Path(path).exists() for path in cgroups))
    await place.host.stop()
    assert list((place.root / "state").iterdir()) == []
    assert not any(Path(path).parent.exists() for path in cgroups)


@contract(on=NAMESPACES)
async def test_thirty_two_at_once(place: Place) -> None:
    tree = place.tree(a_py="print('ran')")

    async def one(number: int) -> bytes:
        sandbox = await place.sandbox(SandboxSpec(workspace=tree, limits=LIMITS))
        try:
            result = await sandbox.exec(f"python3 a.py; echo {number}")
            return result.stdout
        finally:
            await sandbox.destroy()

    assert await asyncio.gather(*map(one, range(32))) == [f"ran\n{number}\n".encode() for number in range(32)]


@contract
async def test_a_creation_that_cannot_work_says_why_and_leaves_nothing(place: Place) -> None:
    with pytest.raises(SandboxError, match="no-such-runtime"):
        await place.sandbox(SandboxSpec(mounts=(RoMount(place.root / "no-such-runtime"),)))
    creating = asyncio.create_task(place.sandbox())
    await asyncio.sleep(0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    sandbox = await place.sandbox()
    assert (await sandbox.exec("echo works")).stdout == b"works\n"
