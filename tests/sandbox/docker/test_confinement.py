"""What containers are asked for and what engines are refused: everything that needs no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from sandbox.environments.docker import probe
from sandbox.environments.docker.container import AGENT, creation, host_config, seccomp
from sandbox.environments.docker.host import DockerHost, judge
from sandbox.environments.spec import ExecResult, SandboxSpec
from sandbox.runner.service import NotReady, agents_of
from server.schemas.runspec import Docker, Limits, RunSpec, Sandbox

SPEC = SandboxSpec(image="task:1", limits=Limits(memory_mb=128, processes=32, cpu_s=20, disk_mb=16))
SEEN = {
    "open": [],
    "interfaces": ["lo", "sit0"],
    "status": {name: ["0000000000000000"] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    | {"NoNewPrivs": ["1"], "Seccomp": ["2"]},
}


def test_an_agents_container_has_no_privilege_and_no_network() -> None:
    asked = host_config(SPEC, {"/runtimes/x": "/runtimes/x"}, storage_opt=False)
    assert (asked["network_mode"], asked["cap_drop"], asked["cap_add"]) == ("none", ["ALL"], [])
    assert (asked["mem_limit"], asked["memswap_limit"], asked["pids_limit"]) == (128 << 20, 128 << 20, 35)
    assert {"Name": "fsize", "Soft": 16 << 20, "Hard": 16 << 20} in asked["ulimits"]
    assert asked["security_opt"][0] == "no-new-privileges"
    (mount,) = asked["mounts"]
    assert (mount["Source"], mount["Target"], mount["Type"], mount["ReadOnly"]) == ("/runtimes/x", "/runtimes/x", "bind", True)
    assert "privileged" not in asked
    made = creation("image", SPEC, 60, {})
    assert (made["network_disabled"], made["entrypoint"][-1]) == (True, "exec sleep 60")


def test_a_verifiers_root_may_become_the_agent_and_nothing_else() -> None:
    grading = host_config(SandboxSpec(grading=True), {}, storage_opt=True)
    assert (grading["cap_drop"], grading["cap_add"]) == (["ALL"], ["SETUID", "SETGID", "KILL"])
    assert grading["storage_opt"] == {"size": "64m"}
    assert AGENT >= 61000


def test_the_filter_refuses_what_that_of_namespaces_refuses() -> None:
    filtered = json.loads(seccomp())
    refused = {name for rule in filtered["syscalls"] if not rule["args"] for name in rule["names"]}
    assert refused >= {"unshare", "setns", "mount", "bpf", "keyctl", "io_uring_setup", "clone3", "userfaultfd", "perf_event_open"}
    families = {rule["args"][0]["value"] for rule in filtered["syscalls"] if "socket" in rule["names"]}
    assert {17, 40} <= families  # packet, vsock
    assert not families & {1, 2, 10, 16}


def test_engines_that_cannot_bound_are_ruled_out() -> None:
    good = {"OSType": "linux", "Architecture": "x86_64", "MemoryLimit": True, "PidsLimit": True, "SecurityOptions": ["name=seccomp"]}
    assert judge({"ApiVersion": "1.41"}, good) == []
    assert "older than 1.41" in judge({"ApiVersion": "1.40"}, good)[0]
    assert "cannot limit memory and processes" in judge({"ApiVersion": "1.43"}, good | {"MemoryLimit": False, "PidsLimit": False})[0]
    assert "use one on Linux" in judge({"ApiVersion": "1.43"}, good | {"Architecture": "aarch64"})[0]
    assert "no seccomp" in judge({"ApiVersion": "1.43"}, good | {"SecurityOptions": []})[0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"open": ["169.254.169.254:80"]}, "not cut off from 169.254.169.254:80"),
        ({"interfaces": ["lo", "eth0"]}, "network interfaces: eth0"),
        ({"status": SEEN["status"] | {"CapBnd": ["00000000a80425fb"]}}, "hold capabilities"),  # type: ignore[operator]
        ({"status": SEEN["status"] | {"NoNewPrivs": ["0"]}}, "gain privileges"),  # type: ignore[operator]
        ({"status": SEEN["status"] | {"Seccomp": ["0"]}}, "not filtered"),  # type: ignore[operator]
    ],
)
def test_what_a_look_from_inside_comes_to(change: dict[str, object], complaint: str | None) -> None:
    found = probe.judge(ExecResult(json.dumps(SEEN | change).encode(), b"", 0))
    assert (found == []) if complaint is None else (complaint in found[0])
    assert "did not say" in probe.judge(ExecResult(b"", b"Traceback", 1))[0]


def test_an_engine_on_the_network_needs_tls() -> None:
    with pytest.raises(ValidationError, match="set tls"):
        Docker(url="tcp://engine:2376")
    assert Docker(url="tcp://engine:2376", tls=Path("/certs")).tls == Path("/certs")
    assert Docker(url="ssh://user@engine").mounts is None
    with pytest.raises(ValidationError):
        Docker(url="http://engine")


def test_what_stands_in_the_way_is_said_before_a_run(tmp_path: Path) -> None:
    assert "sandbox.image is not set" in DockerHost.problems(Sandbox(environment="docker"))[0]
    nowhere = Sandbox(environment="docker", image="x", docker=Docker(url=f"unix://{tmp_path}/docker.sock"))
    (found,) = DockerHost.problems(nowhere)
    assert f"the Docker engine at unix://{tmp_path}/docker.sock cannot be reached" in found
    tcp = Sandbox(environment="docker", image="x", docker=Docker(url="tcp://127.0.0.1:1", tls=tmp_path))
    assert DockerHost.problems(tcp) == [f"sandbox.docker.tls: {tmp_path} has no cert.pem, key.pem, ca.pem"]


def test_nothing_is_forked_into_a_container() -> None:
    document = {
        "model": {"path": "builtin:none"},
        "harnesses": [{"name": "mini-swe-agent", "version": "2.4.6", "start": "warm_fork"}],
        "data": {"family": "onebug"},
        "sandbox": {"environment": "docker", "image": "x"},
    }
    with pytest.raises(NotReady, match="set `start: exec`"):
        agents_of(RunSpec.model_validate(document))
