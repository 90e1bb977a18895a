"""What every sandbox promises, whoever runs it: commands, files, limits, isolation, and that it ends without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sandbox.environments.errors import SandboxError, SandboxLost
from sandbox.environments.namespace.sandbox import Sandbox
from sandbox.environments.namespace.transfer import DEEPEST, MOST
from sandbox.environments.spec import Directory, RoMount, SandboxSpec
from tests.sandbox.environments.contract import LIMITS, Place, contract


def processes(marker: str) -> list[str]:
    """Command lines on this machine that contain `marker`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if marker in line and entry.parent.name != str(os.getpid()) else []
    return found


async def until(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert condition()


async def python(sandbox: Sandbox, code: str) -> str:
    result = await sandbox.exec(["python3", "-c", code], timeout_s=60)
    assert result.return_code == 0, result
    return result.stdout.decode()


# ---------------------------------------------------------------- commands


@contract
async def test_exit_codes_and_streams(place: Place) -> None:
    sandbox = await place.sandbox()
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.return_code, result.timed_out, result.truncated) == (b"out\n", b"err\n", 3, False, False)
    assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).return_code == -9
    missing = await sandbox.exec(["no-such-program"])
    assert missing.return_code == 127
    assert b"no-such-program: No such file or directory" in missing.stderr


@contract
async def test_environment_directory_and_input(place: Place) -> None:
    sandbox = await place.sandbox(SandboxSpec(workspace=place.tree(a_py="x"), workdir="/srv/project", limits=LIMITS))
    result = await sandbox.exec("pwd; echo $NAME; echo $HOME; cat", env={"NAME": "v w"}, stdin=b"typed\n")
    assert result.stdout == b"/srv/project\nv w\n/home/agent\ntyped\n"
    assert (await sandbox.exec("pwd", cwd="/tmp")).stdout == b"/tmp\n"
    result = await sandbox.exec("true", cwd="/nowhere")
    assert (result.return_code, result.stderr) == (126, b"No such file or directory: /nowhere\n")


@contract
async def test_nothing_of_the_host_environment_leaks(place: Place) -> None:
    os.environ["HOST_ONLY_VARIABLE"] = "1"
    sandbox = await place.sandbox()
    names = {line.split("=")[0] for line in (await sandbox.exec("env")).stdout.decode().splitlines()}
    assert names <= {"PATH", "HOME", "USER", "LANG", "TMPDIR", "PWD", "SHLVL", "_"}
    assert (await sandbox.exec("ls /proc/self/fd | wc -l")).stdout == b"4\n"


@contract
async def test_time_out_kills_the_process_group(place: Place) -> None:
    sandbox = await place.sandbox()
    result = await sandbox.exec("trap '' TERM INT; echo started; sleep 4711.25 & sleep 4711.25", timeout_s=3)
    assert (result.timed_out, result.return_code, result.stdout) == (True, -9, b"started\n")
    await until(lambda: not processes("sleep 4711.25"))
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


@contract
async def test_cancelling_kills_the_process_group(place: Place) -> None:
    sandbox = await place.sandbox()
    task = asyncio.create_task(sandbox.exec("sleep 4712.25"))
    await until(lambda: processes("sleep 4712.25"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not processes("sleep 4712.25"))


@contract
async def test_output_is_bounded(place: Place) -> None:
    sandbox = await place.sandbox()
    result = await sandbox.exec("head -c 5000000 /dev/zero; echo done >&2")
    assert (len(result.stdout), result.truncated, result.stderr) == (LIMITS.output_kb * 1024, True, b"done\n")
    result = await sandbox.exec("printf 12345", max_output=5)
    assert (result.stdout, result.truncated) == (b"12345", False)


@contract
async def test_background_processes_live_on_and_hold_nothing_up(place: Place) -> None:
    sandbox = await place.sandbox()
    assert (await sandbox.exec("sleep 4713.25 & echo started")).stdout == b"started\n"
    assert (await sandbox.exec("until pgrep -U agent -x sleep > /dev/null; do :; done; echo found", timeout_s=30)).stdout == b"found\n"


@contract
async def test_a_long_command_line_is_refused_clearly(place: Place) -> None:
    sandbox = await place.sandbox()
    with pytest.raises(SandboxError, match="upload large input as a file"):
        await sandbox.exec(["echo", "x" * 300_000])
    assert len((await sandbox.exec(["echo", "x" * 100_000], max_output=1 << 20)).stdout) == 100_001


# ---------------------------------------------------------------- identity


@contract
async def test_the_agent_has_no_privileges(place: Place) -> None:
    sandbox = await place.sandbox()
    status = (await sandbox.exec("cat /proc/self/status")).stdout.decode()
    fields = {line.split(":")[0]: line.split(":")[1].split() for line in status.splitlines()}
    assert fields["Uid"] == [str(sandbox.uid)] * 4 == fields["Gid"]
    assert sandbox.uid >= 61000
    names = ["CapInh", "CapPrm", "CapEff", "CapAmb"]  # of a pod the bounding set is its root's, which nothing can be gained from
    assert all(int(fields[name][0], 16) == 0 for name in (names if place.pods else [*names, "CapBnd"]))
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == (["1"], ["2"])
    assert (await sandbox.exec("id -un")).stdout == b"agent\n"


@contract
async def test_system_calls_that_reach_out_are_refused(place: Place) -> None:
    sandbox = await place.sandbox()
    code = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(*a):
    return 0 if libc.syscall(*a) >= 0 else ctypes.get_errno()
print("unshare", call(272, 0x10000000), "setns", call(308, 0, 0), "mount", call(165, b"x", b"/tmp", b"tmpfs", 0, 0))
print("clone", call(56, 0x10000000 | 17, 0, 0, 0, 0), "io_uring", call(425, 8, 0), "bpf", call(321, 0, 0, 0), "keyctl", call(250, 0, 0))
print("prlimit", call(302, 1, 7, 0, 0), "chroot", call(161, b"/tmp"))
for family in (16, 17, 38, 40):
    try: socket.socket(family, 2 if family == 38 else 3 if family == 17 else 1 if family == 40 else 2); print(family, "open")
    except OSError as error: print(family, error.errno)
import threading, multiprocessing
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
"""
    assert (await python(sandbox, code)).splitlines() == [
        "unshare 1 setns 1 mount 1",
        "clone 1 io_uring 38 bpf 1 keyctl 1",
        "prlimit 1 chroot 1",
        "16 open",
        "17 97",
        "38 97",
        "40 97",
    ]


@contract
async def test_root_in_the_sandbox_owns_what_the_agent_must_not_write(place: Place) -> None:
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS, directories=(Directory("/tests", "root", 0o700), Directory("/logs/agent"))))
    assert (await sandbox.exec("touch /logs/agent/x")).return_code == 0
    assert (await sandbox.exec("touch /tests/x", user="root")).return_code == 0
    if place.namespaces:  # where an image is, its programs are a layer that root of this one sandbox may write
        assert (await sandbox.exec("touch /usr/x", user="root")).return_code == 1
    assert (await sandbox.exec("touch /usr/x")).return_code == 1
    assert (await sandbox.exec("echo x > /proc/sys/kernel/core_pattern", user="root")).return_code != 0
    if place.where != "rootless":  # an ordinary user has one id, which both identities share
        assert (await sandbox.exec("cat /tests/x; ls /tests")).return_code == 2
        assert (await sandbox.exec("id -u", user="root")).stdout == b"0\n"


@contract
async def test_process_one_cannot_be_harmed(place: Place) -> None:
    sandbox = await place.sandbox()
    await sandbox.exec("for s in 1 2 3 6 9 10 11 12 13 14 15 17 19 20; do kill -$s 1; done; prlimit --pid 1 --nofile=0 2>&1")
    hidden = ["environ", "maps", "cmdline"] if place.namespaces else ["environ", "maps"]
    assert (await sandbox.exec(f"cd /proc/1; cat {' '.join(hidden)}")).stdout == b""
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


# ---------------------------------------------------------------- files


@contract
async def test_the_pristine_tree_is_seen_and_never_written(place: Place) -> None:
    tree = place.tree(main_py="x = 1\n", lib__util_py="y = 2\n")
    sandbox = await place.sandbox(SandboxSpec(workspace=tree, limits=LIMITS))
    assert (await sandbox.exec("cat main.py lib/util.py; rm -r lib; echo x = 3 > main.py; touch new; stat -c %U main.py")).stdout == (
        b"x = 1\ny = 2\nagent\n"
    )
    assert sorted(path.name for path in tree.rglob("*")) == ["lib", "main.py", "util.py"]
    assert (tree / "main.py").read_text() == "x = 1\n"


@contract
async def test_changes(place: Place) -> None:
    tree = place.tree(edit_py="a", gone_py="b", touched_py="c", mode_py="d", folder__one="1", folder__two="2", old__x="x")
    sandbox = await place.sandbox(SandboxSpec(workspace=tree, limits=LIMITS))
    await sandbox.exec(
        "printf A > edit.py; rm gone.py; touch touched.py; chmod 755 mode.py; rm -r folder; mkdir folder; printf 1 > folder/one; "
        "ln -s /etc/passwd link; mkdir -p deep/er; printf '\\0\\377' > deep/er/bin; mkfifo pipe; printf s > secret; "
        "chmod 0 secret; mv old new"
    )
    await sandbox.kill()
    found = {change.path: (change.kind, oct(change.mode), change.data) for change in await sandbox.changes()}
    assert found == {
        "edit.py": ("file", "0o644", b"A"),
        "gone.py": ("deleted", "0o0", b""),
        "mode.py": ("file", "0o755", b"d"),
        "folder/two": ("deleted", "0o0", b""),
        "link": ("link", "0o0", b"/etc/passwd"),
        "deep": ("directory", "0o755", b""),
        "deep/er": ("directory", "0o755", b""),
        "deep/er/bin": ("file", "0o644", b"\0\xff"),
        "secret": ("file", "0o0", b"s"),
        "old": ("deleted", "0o0", b""),
        "new": ("directory", "0o755", b""),
        "new/x": ("file", "0o644", b"x"),
    }
    with pytest.raises(SandboxError, match="larger than 1000 bytes"):
        await sandbox.changes(max_bytes=1000)


@contract
async def test_files_go_up_and_come_down(place: Place) -> None:
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS, directories=(Directory("/logs/agent"),)))
    tree = place.tree(a__b_py="text")
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    await sandbox.upload(tree, "/workspace/up")
    await sandbox.upload(tree / "run.sh", "/home/agent/bin/tool")
    assert (await sandbox.exec("up/run.sh; cat up/a/b.py; ~/bin/tool; stat -c %U up/run.sh")).stdout == b"ran\ntextran\nagent\n"
    await sandbox.exec("mkdir /logs/agent/d; echo hi > /logs/agent/d/log; printf one > /logs/agent/one")
    assert await sandbox.download("/logs/agent", place.root / "out") == []
    await sandbox.download("/logs/agent/one", place.root / "single")
    assert (place.root / "out/d/log").read_text() == "hi\n"
    assert (place.root / "single").read_text() == "one"
    with pytest.raises(SandboxError, match="cannot download /nowhere"):
        await sandbox.download("/nowhere", place.root / "x")
    await sandbox.exec("head -c 100000 /dev/zero > /logs/agent/zero")
    with pytest.raises(SandboxError, match="larger than 50000 bytes"):
        await sandbox.download("/logs/agent", place.root / "y", max_bytes=50_000)
    await sandbox.kill()
    await sandbox.download("/logs/agent", place.root / "after")
    assert (place.root / "after/one").read_text() == "one"


NESTS = "import os; os.chdir('/logs/agent'); [(os.mkdir('d'), os.chdir('d')) for _ in range(1200)]"


@contract
async def test_of_logs_without_end_the_beginning_comes_down(place: Place) -> None:
    """Neither a file that is too large nor directories that are nested too deep take away what lies beside them."""
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS, directories=(Directory("/logs/agent"),)))
    await sandbox.exec(["python3", "-c", NESTS])
    await sandbox.exec("cd /logs/agent; echo what happened > stream; head -c 6000000 /dev/zero | tr '\\0' x > fill; ln -s /etc link")
    with pytest.raises(SandboxError):
        await sandbox.download("/logs/agent", place.root / "whole", 4 << 20, "root")
    for name in ("alive", "after"):
        await sandbox.download("/logs/agent", place.root / name, 4 << 20, "root", cut=True)
        assert (place.root / name / "stream").read_text() == "what happened\n"
        fill = (place.root / name / "fill").read_text()
        assert 100_000 < len(fill) < 4 << 20 and not fill.strip("x")
        with pytest.raises(SandboxError, match="/nowhere"):
            await sandbox.download("/nowhere", place.root / "x", cut=True)
        await sandbox.kill()


@contract
async def test_planted_links_lead_nowhere_on_the_host(place: Place) -> None:
    secret = place.root / "secret"
    secret.mkdir()
    (secret / "file").write_text("host")
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS, directories=(Directory("/logs/agent"),)))
    await sandbox.exec(
        f"cd /logs/agent; ln -s {secret} absolute; ln -s ../../../../../../{secret} relative; ln -s {secret}/file file; mkfifo pipe; "
        f"ln -s /dev/zero zero; echo ok > ok; cd /workspace; ln -s {secret} into; ln -s {secret}/file over"
    )
    skipped = await sandbox.download("/logs/agent", place.root / "out")
    assert sorted(skipped) == ["absolute", "file", "relative", "zero"]
    assert [path.name for path in (place.root / "out").iterdir()] == ["ok"]
    (place.root / "new").write_text("overwritten")
    await sandbox.upload(place.root / "new", "/workspace/over")
    with pytest.raises(SandboxError):
        await sandbox.upload(place.root / "new", "/workspace/into/file")
    with pytest.raises(SandboxError):
        await sandbox.download("/workspace/into/file", place.root / "stolen")
    assert (secret / "file").read_text() == "host"
    assert (await sandbox.exec("cat over; stat -c %F over")).stdout == b"overwrittenregular file\n"


@pytest.mark.slow
@contract
async def test_sparse_files_do_not_hold_the_host_up(place: Place) -> None:
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS, directories=(Directory("/logs/agent"),)))
    assert (await sandbox.exec("truncate -s 1T huge")).return_code != 0
    with contextlib.suppress(SandboxLost):  # where only a look from outside bounds the disk, they count as large as they seem
        await sandbox.exec("for i in $(seq 2000); do truncate -s 15M s$i /logs/agent/s$i; done")
    with pytest.raises(SandboxError, match="larger than"):
        await sandbox.download("/logs/agent", place.root / "out", max_bytes=1 << 20)
    await sandbox.kill()
    with pytest.raises(SandboxError, match="larger than"):
        await sandbox.changes(max_bytes=1 << 20)
    await sandbox.destroy()


WITHOUT_END = {
    "pipes": f"import os; [os.mkfifo(str(i)) for i in range({MOST} + 100)]",
    "directories": f"import os; [(os.mkdir('d'), os.chdir('d')) for _ in range({DEEPEST} + 10)]",
}


@pytest.mark.slow
@contract
async def test_a_tree_without_end_is_the_agents_doing(place: Place) -> None:
    """It weighs nothing, and would take long to be read and longer to be looked at."""
    limits = LIMITS.model_copy(update={"memory_mb": 512, "cpu_s": 120, "disk_mb": MOST >> 7})
    for program in WITHOUT_END.values():
        sandbox = await place.sandbox(SandboxSpec(limits=limits))
        result = await sandbox.exec(["python3", "-c", program])
        assert result.return_code == 0, result.stderr
        await sandbox.kill()
        with pytest.raises(SandboxError, match=r"nested|too long|more files|too large") as caught:
            await sandbox.changes()
        assert not isinstance(caught.value, SandboxLost)
        await sandbox.destroy()


@contract
async def test_mounts_are_read_only_and_at_their_place(place: Place) -> None:
    runtime = place.tree(tool__main_py="print('from the runtime')")
    sandbox = await place.sandbox(SandboxSpec(limits=LIMITS, mounts=(RoMount(runtime), RoMount(runtime / "tool/main.py", "/opt/one.py"))))
    result = await sandbox.exec(f"python3 {runtime}/tool/main.py; python3 /opt/one.py")
    assert result.stdout == b"from the runtime\n" * 2
    for user in ("agent", "root"):
        assert (await sandbox.exec(f"touch {runtime}/x || mount -o remount,rw {runtime}", user=user)).return_code != 0
    assert not (runtime / "x").exists()


# ---------------------------------------------------------------- isolation


@contract
async def test_the_host_is_invisible(place: Place) -> None:
    (place.root / "data").mkdir()
    (place.root / "data/token").write_text("x")
    sandbox = await place.sandbox()
    seen = (
        await sandbox.exec(f"ls -A {place.root} /root /home /mnt /srv /var/lib /sys /run 2>/dev/null; ls /proc | grep -c '^[0-9]'")
    ).stdout
    assert b"token" not in seen
    assert b"data" not in seen
    listing = (await sandbox.exec("ls /home /run; ls -A /root")).stdout.decode().split()
    assert set(listing) <= {"/home:", "agent", "/run:", *Path(sys.base_prefix).parts, ".local", ".cache"}
    assert (await sandbox.exec("ls /sys")).stdout == b"" or not place.namespaces  # of an engine: read-only, with much of it masked
    assert (await sandbox.exec("cat /etc/shadow; hostname")).stdout == b"sandbox\n"
    assert not processes("pytest") or b"pytest" not in (await sandbox.exec("cat /proc/*/cmdline")).stdout


@contract
async def test_the_network_is_only_the_gate(place: Place) -> None:
    sandbox = await place.sandbox()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0host-service")
    abstract.listen(1)
    with abstract, socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        targets = [
            ("127.0.0.1", other.getsockname()[1]),
            ("::1", six.getsockname()[1]),
            ("169.254.169.254", 80),
            ("192.0.2.1", 443),
            ("2001:db8::1", 443),
        ]
        code = f"""
import socket
for target in {targets!r}:
    try: socket.create_connection(target, 3); print(target, "OPEN")
    except OSError as error: print(target[0], error.errno)
try: socket.getaddrinfo("example.com", 80); print("OPEN")
except OSError: print("no names")
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.53", 53)); print("OPEN")
except OSError as error: print("udp", error.errno)
try: socket.socket(socket.AF_UNIX).connect("\\0host-service"); print("OPEN")
except OSError as error: print("abstract", error.errno)
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("OPEN")
except OSError as error: print("raw", error.errno)
print(open("/proc/net/dev").read().count(":"))
"""
        lines = (await python(sandbox, code)).splitlines()
    if place.where == "cluster":  # there is an interface, and what a policy forbids is dropped: nobody answers, and datagrams go nowhere
        assert not any("OPEN" in line for line in lines[:6])
        assert "no names" in lines and {"abstract 111", "raw 1"} <= set(lines)
        return
    assert lines == [
        *("127.0.0.1 111", "::1 111", "169.254.169.254 101", "192.0.2.1 101", "2001:db8::1 101"),
        *("no names", "udp 101", "abstract 111", "raw 1", "1"),
    ]


@contract
async def test_the_gate_reaches_one_address_until_it_closes(place: Place) -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            heard.append(line)
            writer.write(b"host heard " + line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sandbox = await place.sandbox()
    url = await sandbox.open_gate("127.0.0.1", server.sockets[0].getsockname()[1])
    assert url == "http://127.0.0.1:8000" or place.pods
    address = urlsplit(url)
    target = (address.hostname, address.port)
    talk = f"import socket; s = socket.create_connection({target!r}, 5); s.sendall(b'hello\\n'); print(s.recv(99))"
    assert await python(sandbox, talk) == "b'host heard hello\\n'\n"
    with pytest.raises(SandboxError, match="open already"):
        await sandbox.open_gate("127.0.0.1", 1)
    holding = asyncio.create_task(sandbox.exec(["python3", "-c", f"{talk}; print('end', s.recv(99))"]))
    await until(lambda: len(heard) == 2)
    await sandbox.close_gate()
    assert b"Connection" in (await holding).stderr or b"end b''" in (await holding).stdout
    errors = (await sandbox.exec(["python3", "-c", talk])).stderr
    assert b"Connection refused" in errors or (place.pods and b"timed out" in errors)
    server.close()


@contract
async def test_a_client_that_goes_away_is_noticed_behind_the_gate(place: Place) -> None:
    came, gone = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(100):
                came.set()
        gone.set()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    sandbox = await place.sandbox()
    gate = urlsplit(await sandbox.open_gate("127.0.0.1", server.sockets[0].getsockname()[1]))
    code = f"import socket; s = socket.create_connection({(gate.hostname, gate.port)!r}); s.sendall(b'x'); s.recv(1)"
    client = asyncio.create_task(sandbox.exec(["python3", "-c", code]))
    async with asyncio.timeout(60):
        await came.wait()
        client.cancel()
        await gone.wait()
    server.close()


@contract
async def test_two_sandboxes_do_not_see_each_other(place: Place) -> None:
    one, two = await place.sandbox(), await place.sandbox()
    await one.exec("touch /tmp/mine /dev/shm/mine /home/agent/mine mine; sleep 4714.25 & echo $!")
    code = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0mine'); s.listen(); "
    code += "t = socket.create_server(('127.0.0.1', 9000)); time.sleep(600)"
    background = asyncio.create_task(one.exec(["python3", "-c", code]))
    await python(one, "import socket, time\nwhile socket.socket().connect_ex(('127.0.0.1', 9000)): time.sleep(0.01)")
    assert (await two.exec("ls /tmp /dev/shm /home/agent /workspace | grep mine; pgrep -U agent -x sleep")).stdout == b""
    code = (
        "import socket; s = socket.socket(socket.AF_UNIX); print(s.connect_ex('\\0mine'), socket.socket().connect_ex(('127.0.0.1', 9000)))"
    )
    assert await python(two, code) == "111 111\n"
    await one.kill()
    with pytest.raises(SandboxLost):
        await background
    assert (await two.exec("echo alive")).stdout == b"alive\n"
