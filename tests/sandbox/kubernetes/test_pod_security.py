"""Which level of the Pod Security Standards our pods keep: by the published rules, and on a real API server that enforces them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox.environments.kubernetes import manifest
from sandbox.environments.kubernetes.api import Api, ApiError
from sandbox.environments.kubernetes.backend import Kubernetes
from sandbox.environments.spec import RoMount, SandboxSpec
from server.schemas.kubernetes import Kubernetes as Section
from server.schemas.runspec import Limits
from tests.cluster.admission import BASELINE, RESTRICTED
from tests.cluster.config import IMAGE, RUNTIME
from tests.cluster.node import MARK
from tests.sandbox.environments.kubernetes_room import missing, settings_for

Object = dict[str, Any]
OWNER = manifest.Owner("0123abcdef")
LIMITS = Limits(memory_mb=128, processes=32, cpu_s=20, disk_mb=64, output_kb=64)
RUNTIMES: dict[str, Object] = {
    "host_path": {"via": "host_path"},
    "image_volume": {"via": "image_volume", "image": RUNTIME},
    "init_container": {"via": "init_container", "image": RUNTIME},
}
on_cluster = pytest.mark.skipif(bool(missing("cluster")), reason=missing("cluster"))


def pods(via: str, **more: Any) -> Iterator[tuple[str, Object]]:
    """Every kind of pod that a run makes, by its role."""
    settings = Section.model_validate({"runtime": RUNTIMES[via], "pull_policy": "Never", **more})
    mounts = (RoMount(Path(os.__file__).parent),)
    for role in ("agent", "verifier", "probe", "copy"):
        spec = SandboxSpec(limits=LIMITS, mounts=mounts, grading=role == "verifier")
        yield role, manifest.pod(OWNER.new_name(), OWNER, spec, settings, IMAGE, "/opt/python", role)
    yield "pull", manifest.pull(OWNER.new_name(), OWNER, IMAGE, settings, "node-1")


# ---------------------------------------------------------------- the rules as published, for Linux

_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETGID"),
    *("SETPCAP", "SETUID", "SYS_CHROOT"),
}
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_PROFILES = {"RuntimeDefault", "Localhost"}
_SAFE_SYSCTLS: set[str] = set()
"""We set none."""


def everywhere(pod: Object) -> Iterator[tuple[str, Object, Object]]:
    """(name, container, what holds for it: its own security context over the pod's)."""
    spec = pod["spec"]
    for container in (*spec.get("initContainers", []), *spec["containers"], *spec.get("ephemeralContainers", [])):
        yield container["name"], container, {**spec.get("securityContext", {}), **container.get("securityContext", {})}


def baseline(pod: Object) -> set[str]:
    """The controls of the level `baseline` that a pod breaks."""
    spec, broken = pod["spec"], set()
    broken |= {name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)}
    broken |= {"hostPath" for volume in spec.get("volumes", []) if "hostPath" in volume}
    broken |= {"sysctls" for one in spec.get("securityContext", {}).get("sysctls", []) if one["name"] not in _SAFE_SYSCTLS}
    for _, container, held in everywhere(pod):
        broken |= {"privileged"} if held.get("privileged") else set()
        broken |= {"capabilities" for added in held.get("capabilities", {}).get("add", []) if added not in _CAPABILITIES}
        broken |= {"hostPorts" for port in container.get("ports", []) if port.get("hostPort")}
        broken |= {"procMount"} if held.get("procMount", "Default") != "Default" else set()
        broken |= {"seLinuxOptions"} if held.get("seLinuxOptions") else set()
        broken |= {"appArmorProfile"} if held.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined" else set()
        broken |= {"seccompProfile"} if held.get("seccompProfile", {}).get("type", "RuntimeDefault") not in _PROFILES else set()
        broken |= (
            {"probes"}
            if any("host" in str(container.get(kind, "")) for kind in ("livenessProbe", "readinessProbe", "lifecycle"))
            else set()
        )
    return broken


def restricted(pod: Object) -> set[str]:
    """Those of `restricted` that it breaks beyond them."""
    broken = {"volumes" for volume in pod["spec"].get("volumes", []) if not ({*volume} - {"name"}) <= _VOLUMES}
    for _, _, held in everywhere(pod):
        broken |= {"allowPrivilegeEscalation"} if held.get("allowPrivilegeEscalation") is not False else set()
        broken |= {"runAsNonRoot"} if held.get("runAsNonRoot") is not True else set()
        broken |= {"runAsUser"} if held.get("runAsUser") == 0 else set()
        broken |= {"seccompProfile"} if held.get("seccompProfile", {}).get("type") not in _PROFILES else set()
        capabilities = held.get("capabilities", {})
        dropped = "ALL" in capabilities.get("drop", [])
        broken |= {"capabilities"} if not dropped or {*capabilities.get("add", [])} - {"NET_BIND_SERVICE"} else set()
    return broken


@pytest.mark.parametrize(("via", "broken"), [("host_path", {"hostPath"}), ("image_volume", set()), ("init_container", set())])
def test_every_pod_keeps_baseline_but_for_directories_of_its_node(via: str, broken: set[str]) -> None:
    asked = {"memory_volumes": True, "runtime_class": "nydus", "pull_secrets": ["hub"], "priority_class": "low"}
    for role, pod in (*pods(via), *pods(via, **asked)):
        assert baseline(pod) == (set() if role == "pull" else broken), role


@pytest.mark.parametrize(("via", "volumes"), [("host_path", {"volumes"}), ("image_volume", {"volumes"}), ("init_container", set())])
def test_restricted_is_broken_by_root_and_its_capabilities_alone(via: str, volumes: set[str]) -> None:
    root = {"runAsNonRoot", "runAsUser"}
    for role, pod in pods(via):
        assert restricted(pod) == (root if role == "pull" else root | {"capabilities"} | volumes), role


def test_the_rules_find_what_they_are_for() -> None:
    """Changed into what each control forbids, a pod breaks that control."""
    forbidden: dict[str, Object] = {
        "privileged": {"privileged": True},
        "capabilities": {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
        "procMount": {"procMount": "Unmasked"},
        "seLinuxOptions": {"seLinuxOptions": {"type": "spc_t"}},
        "appArmorProfile": {"appArmorProfile": {"type": "Unconfined"}},
        "seccompProfile": {"seccompProfile": {"type": "Unconfined"}},
    }
    for control, change in forbidden.items():
        pod = dict(pods("init_container"))["agent"]
        pod["spec"]["initContainers"][0]["securityContext"] |= change
        assert baseline(pod) == {control}
    for control in ("hostNetwork", "hostPID", "hostIPC"):
        pod = dict(pods("init_container"))["agent"]
        pod["spec"][control] = True
        assert baseline(pod) == {control}
    pod = dict(pods("init_container"))["pull"]
    pod["spec"]["containers"][0]["securityContext"] |= {"runAsUser": 1000, "runAsNonRoot": True}
    assert (baseline(pod), restricted(pod)) == (set(), set())


# ---------------------------------------------------------------- a real API server


@asynccontextmanager
async def guarded(*levels: Object) -> AsyncIterator[tuple[Api, Path]]:
    """The namespace `lego-rl` of docs/kubernetes-rbac.yaml, whose account may use pods of these levels; its kubeconfig."""
    account = {"kind": "User", "name": "runner", "apiGroup": "rbac.authorization.k8s.io"}
    documents = list(yaml.safe_load_all(Path("docs/kubernetes-rbac.yaml").read_text(encoding="utf-8")))
    names = [level["metadata"]["name"] for level in levels]
    use = {"apiGroups": ["policy"], "resources": ["podsecuritypolicies"], "resourceNames": names, "verbs": ["use"]}
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "levels", "namespace": "lego-rl"}}
    documents += [
        *levels,
        rbac | {"kind": "Role", "rules": [use]},
        rbac
        | {
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "levels"},
            "subjects": [account],
        },
    ]
    mark = Path(os.environ[MARK])
    api = await Api.connect(Section(kubeconfig=mark), 8)
    made = []
    try:
        for document in documents:
            if [one["name"] for one in document.get("subjects", [])] == ["runner"]:
                document["subjects"] = [account]
            if document["kind"] != "ServiceAccount":  # the account is a user here, who has a token
                path = _place(document)
                await api.request("POST", path, body=document)
                made.append(f"{path}/{document['metadata']['name']}")
        yield api, mark.with_name("kubeconfig-runner")
    finally:
        for path in reversed(made):
            await api.request("DELETE", path)
        await _gone(api)
        await api.close()


def _place(document: Object) -> str:
    kind = document["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    group = document["apiVersion"]
    root = f"/api/{group}" if group == "v1" else f"/apis/{group}"
    namespace = document["metadata"].get("namespace")
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


async def _gone(api: Api) -> None:
    async with asyncio.timeout(120):
        while any(item["metadata"]["name"] == "lego-rl" for item in (await api.request("GET", "/api/v1/namespaces"))["items"]):
            await asyncio.sleep(0.2)


async def admitted(runner: Api, pod: Object) -> str:
    """Empty when the API server would make the pod; otherwise why not."""
    try:
        await runner.request("POST", f"{runner.path('pods')}", {"dryRun": "All"}, pod, patience=0)
    except ApiError as error:
        return str(error)
    return ""


@on_cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cluster_that_enforces_levels_takes_baseline_and_refuses_restricted() -> None:
    async def main() -> None:
        async with guarded(BASELINE) as (_, kubeconfig):
            runner = await Api.connect(Section(kubeconfig=kubeconfig), 8)
            for role, pod in (*pods("init_container"), *pods("init_container", memory_volumes=True)):
                assert await admitted(runner, pod) == "", role
            for role, pod in pods("host_path"):
                assert ("hostPath volumes are not allowed" in await admitted(runner, pod)) is (role != "pull"), role
            await runner.close()
        async with guarded(RESTRICTED) as (_, kubeconfig):
            runner = await Api.connect(Section(kubeconfig=kubeconfig), 8)
            for role, pod in pods("init_container"):
                said = await admitted(runner, pod)
                assert "running with the root UID is forbidden" in said and "Pod Security level to baseline" in said, said
                assert ("capability may not be added" in said) is (role != "pull"), said
            await runner.close()

    asyncio.run(main())


@on_cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cluster_account_of_the_docs_runs_sandboxes_at_baseline_with_a_runtime_from_an_image(tmp_path: Path) -> None:
    """No right but those of docs/kubernetes-rbac.yaml, no directory of the node, and the probe of egress, too."""

    async def main() -> None:
        async with guarded(BASELINE) as (_, kubeconfig):
            more = {"runtime": RUNTIMES["init_container"], "memory_volumes": True, "pull_policy": "Never", "start_s": 90, "prepull": True}
            settings = settings_for(kubeconfig, IMAGE, **more)
            async with Kubernetes.open(tmp_path, settings) as backend:
                assert await backend.fetch({IMAGE: None}) == {}
                assert list(await backend.fetch({"localhost/no-such:1": None})) == ["localhost/no-such:1"]
                sandbox = await backend.create(SandboxSpec(limits=LIMITS))
                seen = await sandbox.exec("id -u; grep CapEff /proc/self/status; python3 -c 'import json, ssl; print(1)'; echo x > new.txt")
                assert seen.stdout.split() == [str(sandbox.uid).encode(), b"CapEff:", b"0000000000000000", b"1"], seen
                await sandbox.kill()
                assert [change.path for change in await sandbox.changes()] == ["new.txt"]
                await sandbox.destroy()

    asyncio.run(main())
