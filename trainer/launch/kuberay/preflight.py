"""Asks a cluster whether it would take a run's job: what it has, what we may do there, and the very manifest, without keeping it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.schemas.kuberay import KubeRay
from server.schemas.probes import ClusterFacts, Trouble
from server.schemas.runspec import RunSpec

from . import sources
from .api import RIGHTS, Absent, Cluster, ClusterError
from .job import NO_KUBERAY
from .manifest import GROUP, PLURAL, VERSION, Job, rayjob, settings_of

Object = dict[str, Any]
FIELD = "trainer.cluster.kubernetes"
NEEDED = (
    *((GROUP, PLURAL, verb) for verb in ("create", "get", "list", "delete")),
    ("", "secrets", "create"),
    *(("", kind, verb) for kind, verb in (("pods", "list"), ("pods/log", "get"), ("persistentvolumeclaims", "get"))),
)
"""(API group, resource, verb) in the run's namespace. Events are read where that is allowed."""


def cluster_facts(spec: RunSpec) -> ClusterFacts:
    """Never raises for a cluster that is not as it should be: that is a fact."""
    settings = settings_of(spec)
    try:
        cluster = Cluster.connect(settings)
        version: str = cluster.request("GET", "/version")["gitVersion"]
    except ClusterError as error:
        fix = f"set {FIELD}.kubeconfig (and context) to one that reaches the cluster from the server's machine"
        return ClusterFacts(troubles=[Trouble(where=f"{FIELD}.kubeconfig", message=str(error), fix=fix)])
    try:
        troubles = list(_troubles(cluster, spec, settings))
    except ClusterError as error:
        troubles = [Trouble(where=FIELD, message=str(error), fix="see the API server's words")]
    return ClusterFacts(version=version, troubles=troubles)


def _troubles(cluster: Cluster, spec: RunSpec, settings: KubeRay) -> Iterator[Trouble]:
    missing = [needed for needed in NEEDED if not _may(cluster, *needed)]
    if missing:
        listed = ", ".join(f"{verb} {resource}" for _, resource, verb in missing)
        yield Trouble(where=FIELD, message=f"in namespace {cluster.namespace} its account may not {listed}", fix=RIGHTS)
        return
    yield from _manifest(cluster, spec)
    pods = 1 if spec.trainer.device == "cpu" else 1 + spec.trainer.cluster.nodes + spec.trainer.cluster.rollout_nodes
    yield from _claim(cluster, "runs", settings.runs, pods, writes=True)
    for mount in settings.mounts:
        yield from _claim(cluster, "mounts", mount.claim, pods, writes=not mount.read_only)


def _may(cluster: Cluster, group: str, resource: str, verb: str) -> bool:
    kind, _, part = resource.partition("/")
    attributes = {"namespace": cluster.namespace, "group": group, "resource": kind, "verb": verb} | ({"subresource": part} if part else {})
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": attributes}}
    answer = cluster.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
    return bool(answer["status"].get("allowed"))


def _manifest(cluster: Cluster, spec: RunSpec) -> Iterator[Trouble]:
    """A server too old to refuse unknown fields leaves them out of what it would keep."""
    wanted = rayjob(spec, Job(run_id="check", attempt=1, owner="check", sources=sources.digest()))
    try:
        kept = cluster.create(PLURAL, wanted, dry=True)
    except Absent as error:
        yield _absent(cluster, error)
        return
    except ClusterError as error:
        fix = "see the API server's words; a field that it does not know needs KubeRay 1.5.1 or newer"
        yield Trouble(where=FIELD, message=str(error), fix=fix)
        return
    if lost := list(_lost(wanted["spec"], kept["spec"], "spec")):
        message = f"the cluster's {PLURAL}.{GROUP} ({VERSION}) does not know {', '.join(lost)}"
        yield Trouble(where="KubeRay", message=message, fix="install KubeRay 1.5.1 or newer, its CustomResourceDefinitions too")


def _absent(cluster: Cluster, error: Absent) -> Trouble:
    if error.details.get("kind") == "namespaces":
        fix = f"make it: kubectl create namespace {cluster.namespace}, or set {FIELD}.namespace"
        return Trouble(where=f"{FIELD}.namespace", message=f"there is no namespace {cluster.namespace}", fix=fix)
    what, _, fix = NO_KUBERAY.format(namespace=cluster.namespace).partition(": ")
    return Trouble(where="KubeRay", message=what, fix=fix)


def _lost(wanted: Any, kept: Any, place: str) -> Iterator[str]:
    """Fields of `wanted` that `kept` lacks. What a server adds is its own affair."""
    if isinstance(wanted, dict) and isinstance(kept, dict):
        for key, value in wanted.items():
            if key not in kept:
                yield f"{place}.{key}"
            else:
                yield from _lost(value, kept[key], f"{place}.{key}")
    elif isinstance(wanted, list) and isinstance(kept, list):
        for number, (one, other) in enumerate(zip(wanted, kept, strict=False)):
            yield from _lost(one, other, f"{place}[{number}]")


def _claim(cluster: Cluster, field: str, name: str, pods: int, *, writes: bool) -> Iterator[Trouble]:
    where = f"{FIELD}.{field}"
    try:
        modes = cluster.get("persistentvolumeclaims", name)["spec"].get("accessModes", [])
    except Absent:
        message = f"there is no PersistentVolumeClaim {name} in namespace {cluster.namespace}"
        yield Trouble(where=where, message=message, fix="make it, or name one that exists")
        return
    shared = {"ReadWriteMany"} if writes else {"ReadWriteMany", "ReadOnlyMany"}
    if pods > 1 and not shared & set(modes):
        message = f"{pods} pods share PersistentVolumeClaim {name}, whose access modes are {', '.join(modes) or 'none'}"
        yield Trouble(where=where, message=message, fix=f"use a claim of mode {' or '.join(sorted(shared, reverse=True))}")
