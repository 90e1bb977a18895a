"""A namespace of a Kubernetes cluster as a backend: one pod per sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import time
from collections.abc import Coroutine
from pathlib import Path, PurePosixPath
from typing import Any, Self

from sandbox.environments.errors import ImageError, SandboxError
from sandbox.environments.spec import SandboxSpec
from sandbox.harnesses.warm import interpreter
from server.schemas.kubernetes import Kubernetes
from server.schemas.runspec import Sandbox as Settings

from . import manifest, pristine, sweeping
from .api import Api, ApiError, Object
from .gates import listen
from .manifest import Owner
from .pods import Pods, is_ready, obstacle, waits_for
from .sandbox import PodSandbox

log = logging.getLogger(__name__)

_CONNECTIONS_PER_SANDBOX = 4
_CONNECTIONS = 32
_CLOSED_S = 10
_CLOSED_PAUSE_S = 0.5
_STOP_S = 60
_GONE_S = 15
_EVENTS_S = 4
_HOPELESS = "hostPath type check failed"
_FIRST_IMAGE_VOLUMES = (1, 31)
NOT_ENFORCED = (
    "a pod in namespace {namespace} reaches {reached} although its NetworkPolicy forbids it: this cluster does not enforce network "
    "policies; install a network plug-in that does (Calico, Cilium, kube-router, …)"
)


class Cluster:
    """What all sandboxes of one runner share: the connection, the watch, the identity of our objects."""

    def __init__(self, api: Api, settings: Settings, owner: Owner, pods: Pods, address: str) -> None:
        self.api = api
        self.settings: Kubernetes = settings.kubernetes
        self.owner = owner
        self.pods = pods
        self.address = address
        """Of this machine, as pods see it."""
        self.python = interpreter()
        self.version = ""
        self.pids_limit: int | None = None
        """Of a pod, by its kubelet; None when there is none."""
        self.processes = settings.limits.processes
        """That an agent may have."""
        self._image = settings.image
        self._starting = asyncio.Semaphore(self.settings.starts)
        self._sandboxes: set[PodSandbox] = set()
        self._later: set[asyncio.Task[None]] = set()
        self._canary = socket.socket()

    @classmethod
    async def start(cls, owner: Owner, settings: Settings) -> Self:
        """Connected, swept and closed for egress; not proven yet. Raises SandboxError."""
        kube = settings.kubernetes
        api = await Api.connect(kube, settings.concurrency * _CONNECTIONS_PER_SANDBOX + _CONNECTIONS)
        pods = Pods(api, owner.selector)
        try:
            version = await api.request("GET", "/version")
            minor = int("".join(filter(str.isdigit, version["minor"])) or 0)
            if kube.runtime.via == "image_volume" and (int(version["major"]), minor) < _FIRST_IMAGE_VOLUMES:
                raise SandboxError(f"sandbox.kubernetes.runtime: {version['gitVersion']} has no image volumes; use via: init_container")
            await sweeping.sweep(api, owner, 0)
            await api.create("networkpolicies", manifest.deny_all(owner))
            await pods.start()
            address = kube.runner_address
            if address is None:
                address = await asyncio.to_thread(_address_towards, api.host)
            self = cls(api, settings, owner, pods, address)
            self.version = version["gitVersion"]
            self._canary = listen(self.address)
        except BaseException:  # a cancellation too must not leave connections and a watch behind
            await pods.stop()
            await api.close()
            raise
        return self

    async def stop(self) -> None:
        """Every pod and policy of ours is gone, or the cluster is about to end it."""
        self._canary.close()
        for task in list(self._later):
            task.cancel()
        try:
            for sandbox in list(self._sandboxes):
                await sandbox.close_gate()
            async with asyncio.timeout(_STOP_S):
                await sweeping.sweep(self.api, self.owner, _GONE_S)
        except (SandboxError, TimeoutError) as error:
            log.warning(
                "pods may be left in %s: %s; the next start removes them, and the cluster does when their time is over",
                self.api.namespace,
                error,
            )
        finally:
            await self.pods.stop()
            await self.api.close()

    # ---------------------------------------------------------------- sandboxes

    async def create(self, spec: SandboxSpec, role: str = "") -> PodSandbox:
        """See `backend.Backend`. Retrying as a whole is up to the runner; what a busy API server refuses is asked again here."""
        image = spec.image or self._image
        if image is None:
            raise ImageError("a pod needs an image: set sandbox.image, or docker_image in [environment] of the task's task.toml")
        name = self.owner.new_name()
        sandbox = PodSandbox(self, name, manifest.uid_of(name), spec)
        role = role or ("verifier" if spec.grading else "agent")
        body = manifest.pod(name, self.owner, spec, self.settings, manifest.mirrored(image, self.settings.mirrors), self.python, role)
        async with self._starting:
            self.pods.follow(name)
            self._sandboxes.add(sandbox)
            try:
                self.pods.see(await self.api.create("pods", body))
                await self._until_ready(name)
                await self._furnish(sandbox, spec)
            except BaseException:  # a cancellation too must not leave a pod that nobody holds
                self.later(sandbox.vanish())
                raise
        return sandbox

    async def _until_ready(self, name: str) -> None:
        def look(pod: Object | None) -> bool | None:
            if pod is None:
                raise SandboxError(f"pod {name} was deleted before it was ready")
            if pod and (found := obstacle(pod)):
                raise found
            return True if pod and is_ready(pod) else None

        end = time.monotonic() + self.settings.start_s
        while True:
            left = end - time.monotonic()
            try:
                await self.pods.wait(name, look, min(left, _EVENTS_S))
            except TimeoutError:
                why = await self._warning(name)
                if _HOPELESS in why:
                    raise SandboxError(f"the pod cannot start: {why}; does every node have this directory?") from None
                if left < _EVENTS_S:
                    why = why or waits_for(self.pods.latest(name) or {})
                    raise SandboxError(f"no pod within {self.settings.start_s} s (sandbox.kubernetes.start_s): {why}") from None
            else:
                return

    async def _warning(self, name: str) -> str:
        """The last thing that a node said it could not do for a pod; not all of it is in the pod's status."""
        query = {"fieldSelector": f"involvedObject.name={name},type=Warning"}
        with contextlib.suppress(ApiError):  # a help only, and a right of its own
            events = (await self.api.request("GET", self.api.path("events"), query))["items"]
            return f"{events[-1]['reason']}: {events[-1]['message']}" if events else ""
        return ""

    async def _furnish(self, sandbox: PodSandbox, spec: SandboxSpec) -> None:
        """Users, directories, the pristine tree and what is sent of the mounts; and a look whether the pod really is shut in."""
        mounts = manifest.mounts_of(spec, self.settings)
        inside = {
            str(PurePosixPath(mount.at).relative_to(spec.workdir))
            for mount in (*mounts.mounted, *mounts.sent)
            if mount.at.startswith(f"{spec.workdir}/")
        }
        directories = [("/home/agent", "agent", 0o700), *((entry.path, entry.owner, entry.mode) for entry in spec.directories)]
        passed = {str(parent) for mount in (*mounts.mounted, *mounts.sent) for parent in PurePosixPath(mount.at).parents}
        answer = await sandbox.prepare([*directories, (spec.workdir, "agent", 0o755)], sorted(passed - {"/"}), [self.canary])
        self.pids_limit = answer.get("pids")
        if answer["open"]:
            await self._until_closed(sandbox)
        sandbox.left_out = sorted(inside)
        if spec.workspace is not None:
            sandbox.pristine = await asyncio.to_thread(pristine.manifest_of, spec.workspace, inside)
            await sandbox.unpack(await asyncio.to_thread(pristine.pack_tree, spec.workspace, inside), spec.workdir, "agent")
        else:
            sandbox.pristine = await sandbox.read_manifest()
        for mount in mounts.sent:
            await sandbox.upload(mount.source, mount.at, "root")

    @property
    def canary(self) -> tuple[str, int]:
        """A port of this machine that listens and that no pod may reach."""
        return self.address, self._canary.getsockname()[1]

    async def _until_closed(self, sandbox: PodSandbox) -> None:
        """Some clusters let a pod start before its policy holds; nothing of an agent runs before it does."""
        end = time.monotonic() + _CLOSED_S
        while (await sandbox.reaches([self.canary], _CLOSED_PAUSE_S))[0]:
            if time.monotonic() > end:
                raise SandboxError(NOT_ENFORCED.format(namespace=self.api.namespace, reached="a port of the runner's machine"))
            await asyncio.sleep(_CLOSED_PAUSE_S)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something whose end nobody waits for, and that `stop` makes superfluous."""
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def forget(self, sandbox: PodSandbox) -> None:
        self._sandboxes.discard(sandbox)
        self.pods.forget(sandbox.name)


def owner_of(base: Path) -> Owner:
    text = f"{socket.gethostname()}:{base.resolve()}"
    return Owner(hashlib.sha256(text.encode()).hexdigest()[:10])


def _address_towards(host: str) -> str:
    """The address by which this machine reaches the API server."""
    address = host.partition("://")[2].partition("/")[0]
    name, _, port = address.rpartition(":") if address.count(":") == 1 or "]" in address else (address, "", "443")
    info = socket.getaddrinfo(name.strip("[]"), int(port or 443), type=socket.SOCK_DGRAM)[0]
    with socket.socket(info[0], socket.SOCK_DGRAM) as probe_socket:
        probe_socket.connect(info[4])
        found: str = probe_socket.getsockname()[0]
    return found
