"""Does the cluster do what a policy says? Two pods try to get out before a run, from inside, and anything that opens is a refusal.

A cluster without a policy engine accepts every NetworkPolicy and enforces none; nothing but trying tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from urllib.parse import urlsplit

from sandbox.environments.errors import SandboxError
from sandbox.environments.spec import SandboxSpec
from server.schemas.runspec import Limits

from .api import ApiError
from .cluster import NOT_ENFORCED, Cluster
from .sandbox import PodSandbox

_LIMITS = Limits(memory_mb=64, processes=16, cpu_s=60, disk_mb=16)
_LOOK_S = 1.0
_STARTS_S = 20.0
_PEER_PORT = 8099
_OUR_PROCESSES = 32
"""Room that our own commands need beside an agent's, so that a pod full of its processes can be emptied and read."""
_METADATA = (("169.254.169.254", 80), ("100.100.100.200", 80), ("fd00:ec2::254", 80))
_PUBLIC = (("192.0.2.1", 443), ("2001:db8::1", 443))
_LISTEN = f"""
import socket, threading, time
server = socket.create_server(("", {_PEER_PORT}))
threading.Thread(target=lambda: [server.accept() for _ in iter(int, 1)], daemon=True).start()
time.sleep(600)
"""


async def prove(cluster: Cluster) -> None:
    """Raise SandboxError unless a pod reaches its own gate and nothing else, a verifier's pod nothing at all, and processes have room."""
    limits = _LIMITS.model_copy(update={"memory_mb": _LIMITS.memory_mb + cluster.processes // 16})  # `_roomy` starts as many threads
    agent, verifier = await asyncio.gather(
        cluster.create(SandboxSpec(limits=limits, name="probe"), "probe"),
        cluster.create(SandboxSpec(limits=limits, name="probe", grading=True), "probe"),
    )
    answering = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    listening = asyncio.create_task(verifier.exec([cluster.python, "-I", "-S", "-c", _LISTEN], timeout_s=300))
    try:
        async with answering:
            gate = urlsplit(await agent.open_gate("127.0.0.1", answering.sockets[0].getsockname()[1]))
            address, port = gate.hostname or "", gate.port or 0
            if not (await verifier.reaches([("127.0.0.1", _PEER_PORT)], _STARTS_S, patient=True))[0]:
                raise SandboxError("the probe of egress could not begin: a pod does not listen to itself")
            await _roomy(cluster, agent)
            found = await _open(cluster, agent, verifier)
            if (await verifier.reaches([(address, port)], _LOOK_S))[0]:
                found.append("the gate of another pod")
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError, SandboxError):
            await listening
        await asyncio.gather(agent.destroy(), verifier.destroy())
    if found:
        raise SandboxError(NOT_ENFORCED.format(namespace=cluster.api.namespace, reached=", ".join(found)))


async def _roomy(cluster: Cluster, agent: PodSandbox) -> None:
    """What a kubelet allows a pod stands above the pod's own cgroup, where nothing in the pod can read it."""
    wanted = cluster.processes + _OUR_PROCESSES
    if (room := await agent.room(wanted)) < wanted:
        raise SandboxError(
            f"a pod has room for {room} processes, sandbox.limits.processes and our own need {wanted}: an agent could keep us from ending "
            "it; raise podPidsLimit of the nodes' kubelets, or lower sandbox.limits.processes"
        )


async def _open(cluster: Cluster, agent: PodSandbox, verifier: PodSandbox) -> list[str]:
    """In words, what the agent's pod reaches beside its gate."""
    peer = (await cluster.api.get("pods", verifier.name))["status"].get("podIP", "")
    server = urlsplit(cluster.api.host)
    targets = {
        "a port of the runner's machine": cluster.canary,
        "the API server": (server.hostname or "", server.port or 443),
        **({"the API server's service": service} if (service := await _service(cluster)) else {}),
        **({"another pod": (peer, _PEER_PORT)} if peer else {}),
        **{f"metadata at {address}": (address, port) for address, port in _METADATA},
        **{f"{address}:{port}": (address, port) for address, port in _PUBLIC},
    }
    reached = await agent.reaches(list(targets.values()), _LOOK_S)
    found = [words for words, is_open in zip(targets, reached, strict=True) if is_open]
    if await agent.resolves([f"{secrets.token_hex(4)}.kubernetes.default.svc.cluster.local", "kubernetes.default.svc.cluster.local"]):
        found.append("a server of names")
    return found


async def _service(cluster: Cluster) -> tuple[str, int] | None:
    """Where pods find the API server; None where we may not read it."""
    try:
        service = await cluster.api.request("GET", "/api/v1/namespaces/default/services/kubernetes", patience=0)
    except ApiError:
        return None
    return service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]
