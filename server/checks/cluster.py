"""The rules of a run that goes to a Kubernetes cluster: what matters of this machine is that it reaches the cluster, and is reached."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from ..schemas.checks import Check
from ..schemas.runspec import RunSpec
from .facts import Facts
from .rules import INSTALL, device, error, kind, ok, sampling, skipped, warning

FIELD = "trainer.cluster.kubernetes"


def reachable(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """Trainer and runner report from their pods to this server: the one address of this machine that they need."""
    settings = spec.trainer.cluster.kubernetes
    assert settings is not None  # noqa: S101 -- validated with launcher: kubernetes
    address = settings.server or facts.listens
    parts = urlsplit(address)
    host, port = parts.hostname or "", urlsplit(facts.listens).port
    restart = f"rl down, then python -m server --host 0.0.0.0 --public --port {port}"
    name_it = f"set {FIELD}.server to http://ADDRESS:{port} with an address of this machine that pods reach"
    if not settings.server and not facts.loopback and _is_loopback(host):  # it listens everywhere, and does not know by which name
        yield error("reachable", f"{FIELD}.server", "pods do not know by which address they reach this server", name_it)
    elif _is_loopback(host):
        what = f"{FIELD}.server is {address}" if settings.server else f"this server listens on {address}"
        yield error("reachable", f"{FIELD}.server", f"{what}, which in a pod is the pod itself", f"{restart}; {name_it}")
    elif facts.loopback and host not in {name.lower() for name in facts.hostnames}:
        message = f"this server listens on {facts.listens} and does not answer for the host {host}"
        through = f"or, where something forwards {address} to it, start it with --hostname {host}"
        yield error("reachable", f"{FIELD}.server", message, f"{restart}; {through}")
    else:
        if parts.scheme == "http":
            message = f"events and the run's token go to {address} unencrypted"
            yield warning("reachable", f"{FIELD}.server", message, "put TLS in front of the server where others share the network")
        else:
            yield ok("reachable", f"{FIELD}.server", f"pods report to {address}")


def cluster(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    """What the cluster says of itself, of our rights and of the very manifest."""
    if facts.cluster is None or facts.cluster.value is None:
        problem = facts.cluster.problem if facts.cluster else "nobody asked"
        yield error("cluster", FIELD, f"the trainer's environment cannot look at the cluster: {problem}", INSTALL.format(room="trainer"))
        return
    found = facts.cluster.value
    for trouble in found.troubles:
        yield error("cluster", trouble.where, trouble.message, trouble.fix)
    if not found.troubles:
        yield ok("cluster", FIELD, f"Kubernetes {found.version} would take the job: rights, RayJob and claims are there")


def unseen(spec: RunSpec, facts: Facts) -> Iterator[Check]:
    yield skipped("unseen", "model, data, harnesses", "not looked at: they are in the image and on the claims; the pods find out")


CLUSTER_RULES = (kind, device, sampling, reachable, cluster, unseen)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
