"""What is asked of a cluster: one pod per sandbox, one network policy per gate, and one policy that denies everything to all of them.

Every object says whose it is, so that it can be found and removed without being remembered.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.environments.spec import RoMount, SandboxSpec
from server.schemas.kubernetes import Kubernetes

Object = dict[str, Any]
MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "lego-rl"
OWNER, ROLE, POD = "lego-rl/owner", "lego-rl/role", "lego-rl/pod"
TRIAL, EXPIRES = "lego-rl/trial", "lego-rl/expires"
"""Annotations: for people; and the second (since 1970) after which anybody may remove the object."""
HANDLER = "io.containerd.cri.runtime-handler"
"""Without it containerd pulls a pod's images into its own snapshotter, not into that of the pod's runtime (1.7; Nydus has one)."""
OURS = f"{MANAGED_BY}={MANAGER}"

CONTAINER = "main"
MACHINE = {"kubernetes.io/arch": "amd64"}
"""Of the nodes: the pinned runtimes and the filter of system calls are for this one."""
ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What our own processes in a container need: to own what the agent must not write, and to become the agent or end it. Agents have none."""
_FIRST_UID, _UIDS = 1 << 20, 1 << 29
_SCRATCH = ("/home/agent", "/tmp")  # noqa: S108 -- in the pod
# Process 1 belongs to root, takes no signal from anybody in the pod but the one that ends it, and leaves no zombie.
_PROCESS_ONE = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    signal.pause()
"""
_COPY = """
import os, shutil, sys
for number, path in enumerate(sys.argv[1:]):
    target = f"/runtime/{number}"
    shutil.copytree(path, target, symlinks=True) if os.path.isdir(path) else shutil.copy2(path, target)
"""


@dataclass(frozen=True)
class Owner:
    """Whose objects these are: the same for every runner that was started for the same state directory of the same machine."""

    name: str

    @property
    def selector(self) -> str:
        return f"{OURS},{OWNER}={self.name}"

    def labels(self, **more: str) -> dict[str, str]:
        return {MANAGED_BY: MANAGER, OWNER: self.name, **more}

    def new_name(self) -> str:
        """Never used before: events of an earlier object of the same name would be taken for this one's."""
        return f"lego-{self.name}-{secrets.token_hex(5)}"


def uid_of(name: str) -> int:
    """The agent's user in a pod, of that pod alone: the kernel counts processes per user of a node, so who shares one shares the limit."""
    return _FIRST_UID + int(name.rpartition("-")[2], 16) % _UIDS


def mirrored(image: str, mirrors: dict[str, str]) -> str:
    """The reference by which an image is pulled. `docker.io/library/` is what a reference without a registry means."""
    first, _, rest = image.partition("/")
    if not rest:
        whole = f"docker.io/library/{image}"
    elif "." in first or ":" in first or first == "localhost":
        whole = image
    else:
        whole = f"docker.io/{image}"
    matching = [prefix for prefix in mirrors if whole.startswith(f"{prefix.rstrip('/')}/")]
    if not matching:
        return image
    longest = max(matching, key=len)
    return mirrors[longest].rstrip("/") + whole[len(longest.rstrip("/")) :]


@dataclass(frozen=True)
class Mounts:
    """What a pod gets of this machine: `mounted` read-only as the RunSpec says, `sent` as files of root once the pod runs."""

    mounted: tuple[RoMount, ...]
    sent: tuple[RoMount, ...]


def mounts_of(spec: SandboxSpec, settings: Kubernetes) -> Mounts:
    """An image with runtimes holds what lies at its own path; the rest of a sandbox's mounts belongs to one task and is small."""
    wanted = tuple({mount.at: mount for mount in (RoMount(Path(sys.base_prefix)), *spec.mounts)}.values())
    if settings.runtime.via == "host_path":
        return Mounts(wanted, ())
    return Mounts(
        tuple(mount for mount in wanted if mount.at == str(mount.source)),
        tuple(mount for mount in wanted if mount.at != str(mount.source)),
    )


def pod(name: str, owner: Owner, spec: SandboxSpec, settings: Kubernetes, image: str, python: str, role: str) -> Object:
    """`role` is agent, verifier or probe; `python` the path of the interpreter in the pod."""
    limits = spec.limits
    volumes, mounts, init = _runtime(mounts_of(spec, settings).mounted, settings, python)
    scratch = (spec.workdir, *_SCRATCH) if settings.memory_volumes else ()
    for number, path in enumerate(scratch):
        volumes.append({"name": f"scratch-{number}", "emptyDir": {"medium": "Memory", "sizeLimit": f"{limits.disk_mb}Mi"}})
        mounts.append({"name": f"scratch-{number}", "mountPath": path})
    disk = limits.disk_mb + (settings.runtime.size_mb if init else 0)
    container = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": settings.pull_policy,
        "command": [python, "-I", "-S", "-B", "-c", _PROCESS_ONE],
        "workingDir": "/",
        "resources": {
            "limits": {"cpu": _cpus(settings.cpus), "memory": f"{limits.memory_mb}Mi", "ephemeral-storage": f"{disk}Mi"},
            "requests": {
                "cpu": _cpus(min(settings.cpu_request, settings.cpus)),
                "memory": f"{min(settings.memory_request_mb or limits.memory_mb, limits.memory_mb)}Mi",
                "ephemeral-storage": f"{disk}Mi",
            },
        },
        "securityContext": _confined(ROOT_CAPABILITIES),
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": owner.labels(**{ROLE: role, POD: name}),
            "annotations": _annotations(spec.name, settings),
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": settings.ttl_s,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostNetwork": False,
            "hostPID": False,
            "hostIPC": False,
            "shareProcessNamespace": False,
            "hostname": "sandbox",
            # Nobody answers for names: the only server of names is one that is not there.
            "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["127.0.0.1"], "options": [{"name": "attempts", "value": "1"}, {"name": "timeout", "value": "1"}]},
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": volumes,
            **({"initContainers": init} if init else {}),
            **_placement(settings),
        },
    }


def _confined(capabilities: Sequence[str]) -> Object:
    """Of a container. Without privilege escalation no process can gain what it has not: an agent that gave up root has given up all."""
    return {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "runAsUser": 0,
        "runAsGroup": 0,
        "capabilities": {"drop": ["ALL"], **({"add": list(capabilities)} if capabilities else {})},
    }


def _cpus(cpus: float) -> str:
    return f"{math.ceil(cpus * 1000)}m"


def _runtime(mounted: Sequence[RoMount], settings: Kubernetes, python: str) -> tuple[list[Object], list[Object], list[Object]]:
    """Volumes, their mounts and init containers."""
    runtime = settings.runtime
    if runtime.via == "host_path":
        volumes: list[Object] = [
            {
                "name": f"host-{number}",
                "hostPath": {"path": str(mount.source.resolve()), "type": "Directory" if mount.source.is_dir() else "File"},
            }
            for number, mount in enumerate(mounted)
        ]
        return volumes, [{"name": f"host-{number}", "mountPath": mount.at, "readOnly": True} for number, mount in enumerate(mounted)], []
    assert runtime.image is not None  # noqa: S101 -- by its model
    image = mirrored(runtime.image, settings.mirrors)
    paths = [mount.at for mount in mounted]
    if runtime.via == "image_volume":
        volume: Object = {"name": "runtime", "image": {"reference": image, "pullPolicy": settings.pull_policy}}
        sub = [path.lstrip("/") for path in paths]
        init = []
    else:
        volume = {"name": "runtime", "emptyDir": {"sizeLimit": f"{runtime.size_mb}Mi"}}
        sub = [str(number) for number in range(len(paths))]
        room = {"cpu": _cpus(settings.cpus), "memory": "256Mi", "ephemeral-storage": f"{runtime.size_mb}Mi"}
        init = [
            {
                "name": "runtime",
                "image": image,
                "imagePullPolicy": settings.pull_policy,
                "command": [python, "-I", "-S", "-B", "-c", _COPY, *paths],
                "resources": {"limits": room, "requests": {**room, "cpu": _cpus(min(settings.cpu_request, settings.cpus))}},
                "securityContext": _confined(()),
                "volumeMounts": [{"name": "runtime", "mountPath": "/runtime"}],
            }
        ]
    mounts = [{"name": "runtime", "mountPath": path, "subPath": part, "readOnly": True} for path, part in zip(paths, sub, strict=True)]
    return [volume], mounts, init


def _annotations(trial: str, settings: Kubernetes) -> Object:
    found = {TRIAL: trial[:200], EXPIRES: str(int(time.time()) + settings.ttl_s)}
    return found | ({HANDLER: settings.runtime_class} if settings.runtime_class else {})


def _placement(settings: Kubernetes) -> Object:
    wanted: Object = {
        "runtimeClassName": settings.runtime_class,
        "priorityClassName": settings.priority_class,
        "nodeSelector": MACHINE | settings.node_selector,
        "imagePullSecrets": [{"name": name} for name in settings.pull_secrets],
    }
    return {name: value for name, value in wanted.items() if value}


def deny_all(owner: Owner) -> Object:
    """For every pod of an owner, from its first moment: nothing in, nothing out."""
    return _policy(f"lego-{owner.name}-deny", owner, {OWNER: owner.name}, [])


def gate(name: str, owner: Owner, address: str, port: int, lives_s: int) -> Object:
    """One pod may reach one port of one address; policies add up, and nothing else allows anything."""
    mask = 128 if ":" in address else 32
    rule = {"to": [{"ipBlock": {"cidr": f"{address}/{mask}"}}], "ports": [{"protocol": "TCP", "port": port}]}
    policy = _policy(name, owner, {POD: name}, [rule])
    policy["metadata"]["annotations"] = {EXPIRES: str(int(time.time()) + lives_s)}
    return policy


def _policy(name: str, owner: Owner, selected: dict[str, str], egress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": owner.labels()},
        "spec": {
            "podSelector": {"matchLabels": selected},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    }


def pull(name: str, owner: Owner, image: str, settings: Kubernetes, node: str | None) -> Object:
    """A pod that has no other use than that its node must have the image. What it runs need not even exist."""
    small = {"cpu": "10m", "memory": "16Mi"}
    placement = _placement(settings)
    if node is not None:
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        placement["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": owner.labels(**{ROLE: "pull", POD: name}),
            "annotations": _annotations("", settings),
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": settings.ttl_s,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": CONTAINER,
                    "image": image,
                    "imagePullPolicy": settings.pull_policy,
                    "command": ["/bin/true"],
                    "resources": {"limits": small, "requests": small},
                    "securityContext": _confined(()),
                }
            ],
            **placement,
        },
    }
