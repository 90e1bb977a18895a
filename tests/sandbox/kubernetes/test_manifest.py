"""Every field of what is asked of a cluster, and how images are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client import ApiClient, V1NetworkPolicy, V1Pod

from sandbox.environments.kubernetes import manifest
from sandbox.environments.kubernetes.manifest import Owner
from sandbox.environments.spec import RoMount, SandboxSpec
from server.schemas.kubernetes import Kubernetes
from server.schemas.runspec import Limits

OWNER = Owner("0123abcdef")
LIMITS = Limits(memory_mb=512, processes=64, cpu_s=60, disk_mb=128)


def made(settings: Kubernetes | None = None, **more: Any) -> dict[str, Any]:
    spec = SandboxSpec(**{"limits": LIMITS, "name": "trial-7"} | more)
    return manifest.pod(OWNER.new_name(), OWNER, spec, settings or Kubernetes(), "registry.example/task:1", "/opt/python", "agent")


def test_a_pod_has_no_identity_no_name_server_and_an_end() -> None:
    spec = made(Kubernetes(ttl_s=900))["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert (spec["hostNetwork"], spec["hostPID"], spec["hostIPC"], spec["shareProcessNamespace"]) == (False, False, False, False)
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 900
    assert spec["dnsPolicy"] == "None"
    assert spec["dnsConfig"]["nameservers"] == ["127.0.0.1"]
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}


def test_a_container_gains_nothing_and_has_limits_of_every_kind() -> None:
    container = made(Kubernetes(cpus=1.5, cpu_request=0.25, memory_request_mb=128))["spec"]["containers"][0]
    confined = container["securityContext"]
    assert (confined["privileged"], confined["allowPrivilegeEscalation"]) == (False, False)
    assert confined["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]}
    assert container["resources"] == {
        "limits": {"cpu": "1500m", "memory": "512Mi", "ephemeral-storage": "128Mi"},
        "requests": {"cpu": "250m", "memory": "128Mi", "ephemeral-storage": "128Mi"},
    }
    assert container["command"][:5] == ["/opt/python", "-I", "-S", "-B", "-c"]


def test_a_request_is_never_above_its_limit() -> None:
    resources = made(Kubernetes(cpus=0.1, cpu_request=4, memory_request_mb=4096))["spec"]["containers"][0]["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == "100m"
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_whose_a_pod_is_stands_on_it() -> None:
    metadata = made()["metadata"]
    assert metadata["labels"] == {
        "app.kubernetes.io/managed-by": "lego-rl",
        "lego-rl/owner": "0123abcdef",
        "lego-rl/role": "agent",
        "lego-rl/pod": metadata["name"],
    }
    assert metadata["annotations"]["lego-rl/trial"] == "trial-7"
    assert len({OWNER.new_name() for _ in range(100)}) == 100
    assert manifest.uid_of(metadata["name"]) >= 1 << 20


def test_runtimes_come_from_the_node(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("")
    pod = made(mounts=(RoMount(tmp_path), RoMount(tmp_path / "tool.py", "/opt/tool.py")))
    assert [volume["hostPath"] for volume in pod["spec"]["volumes"]] == [
        {"path": str(Path(sys.base_prefix).resolve()), "type": "Directory"},
        {"path": str(tmp_path), "type": "Directory"},
        {"path": str(tmp_path / "tool.py"), "type": "File"},
    ]
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == [sys.base_prefix, str(tmp_path), "/opt/tool.py"]
    assert all(mount["readOnly"] for mount in mounts)


def test_runtimes_come_from_an_image_and_the_tasks_own_are_sent(tmp_path: Path) -> None:
    settings = Kubernetes.model_validate(
        {"runtime": {"via": "image_volume", "image": "tools:1"}, "mirrors": {"docker.io": "mirror:5000/hub"}}
    )
    mounts = (RoMount(tmp_path), RoMount(tmp_path / "history", "/workspace/.git"))
    spec = made(settings, mounts=mounts)["spec"]
    reference = "mirror:5000/hub/library/tools:1"
    assert spec["volumes"] == [{"name": "runtime", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}]
    assert spec["containers"][0]["volumeMounts"] == [
        {"name": "runtime", "mountPath": path, "subPath": path.lstrip("/"), "readOnly": True} for path in (sys.base_prefix, str(tmp_path))
    ]
    assert manifest.mounts_of(SandboxSpec(mounts=mounts), settings).sent == (mounts[1],)


def test_runtimes_are_copied_by_a_container_without_any_privilege(tmp_path: Path) -> None:
    settings = Kubernetes.model_validate({"runtime": {"via": "init_container", "image": "tools:1", "size_mb": 300}})
    spec = made(settings, mounts=(RoMount(tmp_path),))["spec"]
    init = spec["initContainers"][0]
    assert init["command"][-2:] == [sys.base_prefix, str(tmp_path)]
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["volumes"] == [{"name": "runtime", "emptyDir": {"sizeLimit": "300Mi"}}]
    assert [mount["subPath"] for mount in spec["containers"][0]["volumeMounts"]] == ["0", "1"]
    assert spec["containers"][0]["resources"]["limits"]["ephemeral-storage"] == "428Mi"


def test_scratch_in_memory_and_lazy_pulls_are_asked_for() -> None:
    plain = made()["spec"]
    assert "runtimeClassName" not in plain
    assert not any("emptyDir" in volume for volume in plain["volumes"])
    asked = Kubernetes(runtime_class="nydus", memory_volumes=True, priority_class="low", pull_secrets=["hub"], node_selector={"pool": "rl"})
    pod, ahead = made(asked), manifest.pull(OWNER.new_name(), OWNER, "task:1", asked, "node-1")
    for one in (pod, ahead):  # a lazy pull is one only in the snapshotter of the runtime that mounts it
        assert one["spec"]["runtimeClassName"] == "nydus"
        assert one["metadata"]["annotations"]["io.containerd.cri.runtime-handler"] == "nydus"
    assert "io.containerd.cri.runtime-handler" not in made()["metadata"]["annotations"]
    spec = pod["spec"]
    assert spec["priorityClassName"] == "low"
    assert (spec["imagePullSecrets"], spec["nodeSelector"]) == ([{"name": "hub"}], {"kubernetes.io/arch": "amd64", "pool": "rl"})
    memory = {"medium": "Memory", "sizeLimit": "128Mi"}
    assert [volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume] == [memory] * 3
    paths = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if mount["name"].startswith("scratch")]
    assert paths == ["/workspace", "/home/agent", "/tmp"]  # noqa: S108 -- in the pod


def test_policies_deny_everything_and_allow_one_port() -> None:
    everything = manifest.deny_all(OWNER)["spec"]
    assert everything["podSelector"] == {"matchLabels": {"lego-rl/owner": "0123abcdef"}}
    assert (everything["policyTypes"], everything["ingress"], everything["egress"]) == (["Ingress", "Egress"], [], [])
    gate = manifest.gate("lego-x-1", OWNER, "192.0.2.7", 4711, 60)["spec"]
    assert gate["podSelector"] == {"matchLabels": {"lego-rl/pod": "lego-x-1"}}
    assert gate["egress"] == [{"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}], "ports": [{"protocol": "TCP", "port": 4711}]}]
    assert manifest.gate("x", OWNER, "2001:db8::7", 1, 60)["spec"]["egress"][0]["to"][0]["ipBlock"]["cidr"] == "2001:db8::7/128"


@pytest.mark.parametrize(
    ("image", "pulled"),
    [
        ("python:3.12", "mirror.example/hub/library/python:3.12"),
        ("swebench/sweb:1", "mirror.example/hub/swebench/sweb:1"),
        ("docker.io/swebench/sweb:1", "mirror.example/hub/swebench/sweb:1"),
        ("ghcr.io/org/task@sha256:0", "mirror.example/ghcr/org/task@sha256:0"),
        ("ghcr.io/org/hot/task:1", "hot.example/task:1"),
        ("quay.io/x/y:1", "quay.io/x/y:1"),
        ("localhost:5000/x:1", "localhost:5000/x:1"),
        ("ghcr.iox/y:1", "ghcr.iox/y:1"),
    ],
)
def test_images_are_pulled_from_mirrors(image: str, pulled: str) -> None:
    mirrors = {"docker.io": "mirror.example/hub", "ghcr.io/": "mirror.example/ghcr/", "ghcr.io/org/hot": "hot.example"}
    assert manifest.mirrored(image, mirrors) == pulled


@given(st.from_regex(r"[a-z0-9.:/-]{1,40}", fullmatch=True))
def test_without_mirrors_an_image_keeps_its_name(image: str) -> None:
    assert manifest.mirrored(image, {}) == image


def test_the_client_knows_every_field(tmp_path: Path) -> None:
    """What the client's own model of an object does not know is lost on the way back."""
    back = ApiClient().sanitize_for_serialization
    for runtime in ({"via": "host_path"}, {"via": "init_container", "image": "a:1"}, {"via": "image_volume", "image": "a:1"}):
        settings = Kubernetes.model_validate({"runtime": runtime, "memory_volumes": True, "runtime_class": "x", "pull_secrets": ["s"]})
        pod = made(settings, mounts=(RoMount(tmp_path),))
        assert back(V1Pod.from_dict(pod)) == pod
    for policy in (manifest.deny_all(OWNER), manifest.gate("x", OWNER, "192.0.2.7", 1, 60)):
        assert back(V1NetworkPolicy.from_dict(policy)) == policy
    pull = manifest.pull("lego-x-2", OWNER, "a:1", Kubernetes(), "node-1")
    assert back(V1Pod.from_dict(pull)) == pull


def test_runtime_settings_belong_together() -> None:
    with pytest.raises(ValueError, match=r"runtime\.image goes with"):
        Kubernetes.model_validate({"runtime": {"via": "image_volume"}})
    with pytest.raises(ValueError, match=r"runtime\.image goes with"):
        Kubernetes.model_validate({"runtime": {"image": "a:1"}})
