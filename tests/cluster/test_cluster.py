"""The real cluster of `make test-cluster`: policies hold on it, and the machine around it keeps its settings."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.config import ADDRESS, IMAGE
from tests.cluster.node import MARK
from tests.cluster.policy import rules

here = pytest.mark.skipif(MARK not in os.environ, reason="needs the real cluster of `make test-cluster`")


def policy(address: str, port: int) -> dict[str, Any]:
    egress = [{"to": [{"ipBlock": {"cidr": f"{address}/32"}}], "ports": [{"port": port, "protocol": "TCP"}]}]
    spec = {"podSelector": {"matchLabels": {"trial": "x"}}, "policyTypes": ["Egress", "Ingress"], "egress": egress}
    return {"metadata": {"name": "p", "namespace": "default"}, "spec": spec}


def test_a_pod_is_closed_until_its_policies_were_read() -> None:
    pod: dict[str, Any] = {"metadata": {"namespace": "default", "labels": {"trial": "x"}}, "status": {"podIP": "198.18.30.2"}}
    assert "198.18.30.2" not in rules([], [])
    assert "ip saddr 198.18.30.2 accept" in rules([pod], [])
    closed = rules([pod], [policy("198.18.20.1", 8000)])
    assert "ip saddr 198.18.30.2 ip daddr 198.18.20.1 tcp dport 8000 accept" in closed and "ip saddr 198.18.30.2 accept" not in closed


@pytest.fixture
def api() -> Iterator[Any]:
    from kubernetes import client, config

    config.load_kube_config(os.environ[MARK])
    yield client
    client.CoreV1Api().delete_collection_namespaced_pod("default", grace_period_seconds=0)
    client.NetworkingV1Api().delete_collection_namespaced_network_policy("default")


def running(api: Any, name: str, labels: dict[str, str]) -> None:
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "1000"]}
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    core = api.CoreV1Api()
    core.create_namespaced_pod("default", {"metadata": {"name": name, "labels": labels}, "spec": spec})
    while not any(status.ready for status in core.read_namespaced_pod(name, "default").status.container_statuses or ()):
        time.sleep(0.1)


def printed(api: Any, name: str, command: str) -> str:
    from kubernetes.stream import stream

    call = api.CoreV1Api().connect_get_namespaced_pod_exec
    return str(stream(call, name, "default", command=["bash", "-c", command], stderr=True, stdout=True, stdin=False, tty=False))


@here
@pytest.mark.timeout(120)
def test_a_policy_closes_a_pod_of_the_real_cluster_but_for_one_port(api: Any) -> None:
    """The API server's port stands for the one that is allowed, the kubelet's for all others."""
    api.NetworkingV1Api().create_namespaced_network_policy("default", policy(ADDRESS, 16443))
    running(api, "closed", {"trial": "x"})
    running(api, "open", {})
    reach = f'for port in 16443 10250; do (timeout 2 bash -c "exec 3<>/dev/tcp/{ADDRESS}/$port" && echo $port) 2>/dev/null; done'
    seen = {name: "" for name in ("closed", "open")}
    deadline = time.monotonic() + 30
    while seen != {"closed": "16443\n", "open": "16443\n10250\n"} and time.monotonic() < deadline:
        seen = {name: printed(api, name, reach) for name in seen}
    assert seen == {"closed": "16443\n", "open": "16443\n10250\n"}


@here
def test_the_kubelet_changed_nothing_that_outlives_the_cluster(api: Any) -> None:
    """It sees copies of these settings; a container's own /proc shows the kernel's."""
    assert Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1"
    running(api, "shows", {})
    assert printed(api, "shows", "cat /proc/sys/vm/overcommit_memory /proc/sys/kernel/panic_on_oops").split() == ["0", "0"]
