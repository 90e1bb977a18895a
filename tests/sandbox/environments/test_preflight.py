"""Whether a machine can run sandboxes, from its facts; and which cgroups it offers, from what the kernel says about them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.environments.errors import SandboxError
from sandbox.environments.namespace.cgroups import hierarchies
from sandbox.environments.namespace.host import Host
from sandbox.environments.namespace.preflight import Facts, default_mode, judge, problems
from sandbox.environments.spec import Directory, RoMount, SandboxSpec
from sandbox.redteam.ordinary import as_ordinary_user

GOOD = Facts(
    system="Linux",
    machine="x86_64",
    kernel=(6, 6),
    uid=0,
    overlay=True,
    user_namespaces=1000,
    apparmor_restricts=False,
    capabilities=(1 << 41) - 1,
)


@pytest.mark.parametrize(
    ("facts", "mode", "said"),
    [
        (GOOD, "rootful", []),
        (replace(GOOD, uid=1000, capabilities=0), "rootless", []),
        (replace(GOOD, system="Darwin", machine="arm64"), "rootless", ["this is Darwin on arm64"]),
        (replace(GOOD, kernel=(5, 15)), "rootful", ["Linux 5.15 is too old"]),
        (replace(GOOD, kernel=(6, 1)), "rootful", []),
        (replace(GOOD, kernel=(6, 1), uid=1000), "rootless", ["use 6.6 or newer, or run as root"]),
        (replace(GOOD, overlay=False), "rootful", ["modprobe overlay"]),
        (replace(GOOD, uid=1000), "rootful", ["run as root, or use mode `rootless`"]),
        (replace(GOOD, capabilities=0x000000A80425FB), "rootful", ["no CAP_SYS_ADMIN"]),
        (replace(GOOD, uid=1000, user_namespaces=0), "rootless", ["sysctl -w user.max_user_namespaces"]),
        (replace(GOOD, uid=1000, apparmor_restricts=True), "rootless", ["apparmor_restrict_unprivileged_userns=0"]),
        (replace(GOOD, kernel=(4, 18), overlay=False), "rootful", ["too old", "overlay"]),
    ],
)
def test_every_problem_is_named_with_what_to_do(facts: Facts, mode: str, said: list[str]) -> None:
    found = judge(facts, mode)  # type: ignore[arg-type]
    assert len(found) == len(said)
    assert all(words in message for words, message in zip(said, found, strict=True))


V1_MOUNTS = """
30 25 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 25 0:27 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 25 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
""".strip()


def test_version_1_and_2_side_by_side() -> None:
    groups = "9:cpu,cpuacct:/\n8:pids:/\n4:memory:/job/1\n1:name=systemd:/\n0::/user\n"
    v1, v2 = hierarchies(groups, V1_MOUNTS)
    cpu = "/sys/fs/cgroup/cpu,cpuacct"
    assert v1 == {"memory": "/sys/fs/cgroup/memory/job/1", "pids": "/sys/fs/cgroup/pids", "cpu": cpu, "cpuacct": cpu}
    assert v2 == ("/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/user")


def test_version_2_alone() -> None:
    mounts = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
    assert hierarchies("0::/user.slice/user-1000.slice/app.scope\n", mounts) == (
        {},
        ("/sys/fs/cgroup", "/sys/fs/cgroup/user.slice/user-1000.slice/app.scope"),
    )


def test_a_container_that_sees_its_own_part_of_the_tree() -> None:
    mounts = "30 25 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw"
    assert hierarchies("0::/docker/abc\n", mounts) == ({}, ("/sys/fs/cgroup", "/sys/fs/cgroup"))


@pytest.mark.parametrize("path", ["workspace", "/a/../b", "/a/", "/", "/a//b", "/./a"])
def test_paths_of_a_sandbox_are_absolute_and_plain(path: str) -> None:
    for make in (
        lambda: SandboxSpec(workdir=path),
        lambda: SandboxSpec(directories=(Directory(path),)),
        lambda: SandboxSpec(mounts=(RoMount(Path("/x"), path),)),
    ):
        with pytest.raises(ValueError, match="no absolute path"):
            make()


@pytest.mark.skipif(bool(problems(default_mode())), reason="; ".join(problems(default_mode())) or "-")
def test_a_target_behind_a_link_is_refused(tmp_path: Path) -> None:
    """While the tree is built, an absolute link in it still leads to the host."""

    async def main() -> None:
        async with Host.open(tmp_path / "state") as host:
            for path in ("/bin/made-on-the-host", "/var/run/made-on-the-host"):
                with pytest.raises(SandboxError, match="leads through a link in the sandbox"):
                    await host.create(SandboxSpec(directories=(Directory(path),)))

    asyncio.run(main())
    assert not Path("/usr/bin/made-on-the-host").exists()


def test_a_base_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def main(base: Path) -> None:
        with pytest.raises(SandboxError, match=r"cannot keep the state of sandboxes in .*; choose a directory that you can write"):
            await Host.start(base)

    asyncio.run(main(tmp_path / "file"))
    if os.geteuid() == 0 and not problems("rootless"):
        as_ordinary_user(lambda: asyncio.run(main(Path("/etc/not-mine"))))
