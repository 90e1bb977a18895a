"""The one way out of a pod: a port of the runner's machine that only this pod may reach, relayed to the rollout's proxy.

The policy in the cluster keeps the pod from everything else; the relay on this machine is what ends all of it at once, whatever a cluster
does with connections that were open before a policy changed.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Self

from sandbox.environments.errors import SandboxError
from sandbox.environments.namespace.gate import Gate

from . import manifest
from .api import ApiError

if TYPE_CHECKING:
    from .cluster import Cluster


def listen(address: str) -> socket.socket:
    """A free port of the runner's machine. Raises SandboxError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=128)
    except OSError as error:
        raise SandboxError(f"sandbox.kubernetes.runner_address: cannot listen on {address}: {error.strerror}") from error


class PodGate:
    def __init__(self, cluster: Cluster, name: str, relay: Gate, port: int) -> None:
        self._cluster = cluster
        self._name = name
        self._relay = relay
        self.address = cluster.address
        self.port = port

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"

    @classmethod
    async def open(cls, cluster: Cluster, pod: str, host: str, port: int) -> Self:
        """Raises SandboxError; nothing is open then."""
        listener = listen(cluster.address)
        relay = Gate(listener, host, port)
        await relay.open()
        self = cls(cluster, pod, relay, listener.getsockname()[1])
        try:
            policy = manifest.gate(pod, cluster.owner, cluster.address, self.port, cluster.settings.ttl_s)
            await cluster.api.create("networkpolicies", policy)
        except BaseException:  # a cancellation too must not leave the relay open
            await relay.close()
            raise
        return self

    async def close(self) -> None:
        await self._relay.close()
        with contextlib.suppress(ApiError):  # what is left of the policy allows a port behind which nobody is; the sweep takes it
            await self._cluster.api.delete("networkpolicies", self._name)
