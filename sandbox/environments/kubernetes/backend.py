"""The Kubernetes backend as `sandbox.environments.backend` knows it. The client library is imported with the first use only."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import io
import json
import logging
import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self, override

from sandbox.environments.backend import Backend
from sandbox.environments.errors import ImageError, SandboxError
from sandbox.environments.spec import SandboxSpec
from server.schemas.runspec import Limits
from server.schemas.runspec import Sandbox as Settings

if TYPE_CHECKING:
    from .cluster import Cluster
    from .sandbox import PodSandbox

log = logging.getLogger(__name__)

_RECORD = "kubernetes.json"
_GONE_S = 15
_COPYING = Limits(memory_mb=512, processes=64, cpu_s=600, disk_mb=2048)
_LARGEST_TREE = 1 << 30
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Kubernetes(Backend):
    """`{base}/kubernetes.json` says which cluster may still hold objects of this owner, and is locked as long as the owner lives."""

    def __init__(self, cluster: Cluster, base: Path, record: int) -> None:
        self._cluster = cluster
        self._base = base
        self._record = record
        self.label = f"kubernetes/{cluster.version}"
        self.limits_mode = "cgroup"

    @classmethod
    @override
    async def start(cls, base: Path, settings: Settings, prove: bool = True) -> Self:
        """`prove` runs the probe of egress; nothing but a test of something else may go without."""
        from . import probe
        from .cluster import Cluster, owner_of

        if found := cls.problems(settings):
            raise SandboxError("; ".join(found))
        record = _claim(base, settings)
        try:
            cluster = await Cluster.start(owner_of(base), settings)
        except BaseException:  # whatever it was, nobody owns the record now
            os.close(record)
            raise
        self = cls(cluster, base, record)
        try:
            if prove:
                await probe.prove(cluster)
        except BaseException:  # a cancellation too must not leave pods behind
            await self.stop()
            raise
        self._announce(base)
        return self

    @classmethod
    @override
    def problems(cls, settings: Settings) -> list[str]:
        found = []
        kube = settings.kubernetes
        if importlib.util.find_spec("kubernetes") is None:
            found.append("the Kubernetes client is not installed: `make install`")
        if Path(sys.base_prefix).is_relative_to("/usr") and not Path(sys.base_prefix).is_relative_to("/usr/local"):
            found.append(f"the runner's Python lies in {sys.base_prefix}, which is the image's in a pod: use one with a prefix of its own")
        if kube.kubeconfig is None and not _SERVICE_ACCOUNT.exists():
            found.append("sandbox.kubernetes.kubeconfig: this machine is no pod with a service account, so name a kubeconfig")
        if kube.kubeconfig is not None and not kube.kubeconfig.expanduser().is_file():
            found.append(f"sandbox.kubernetes.kubeconfig: there is no file {kube.kubeconfig}")
        stages = settings.budgets
        longest = stages.sandbox_setup_s + stages.agent_setup_s + stages.agent_s + stages.verifier_s
        if longest > kube.ttl_s:
            found.append(f"sandbox.kubernetes.ttl_s: pods end after {kube.ttl_s} s, but sandbox.budgets allow a trial {longest:g} s")
        return found

    @classmethod
    @override
    def sweep(cls, base: Path) -> list[str]:
        path = base / _RECORD
        try:
            record = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return []
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = os.pread(record, 1 << 20, 0)
            removed = asyncio.run(_sweep(base, Settings.model_validate(json.loads(text)))) if text else []
            path.unlink()
        except BlockingIOError:
            return []
        except SandboxError as error:
            log.warning("pods may be left of %s: %s; what is known of them is kept for the next time", base, error)
            return []
        finally:
            os.close(record)
        return removed

    @classmethod
    @override
    def abandoned(cls, base: Path) -> list[str]:
        try:
            record = os.open(base / _RECORD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return []
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        finally:
            os.close(record)
        return [f"{base / _RECORD}: pods of a runner that is gone"]

    @override
    async def create(self, spec: SandboxSpec) -> PodSandbox:
        return await self._cluster.create(spec)

    @override
    async def fetch(self, images: Mapping[str, Path | None]) -> dict[str, str]:
        """Pull them ahead where the RunSpec says so. A cluster builds nothing: an image has to be in a registry by its name."""
        from .pulling import pull_all

        return await pull_all(self._cluster, images) if self._cluster.settings.prepull else {}

    @override
    async def copy_out(self, image: str, path: str, target: Path) -> None:
        sandbox = await self._cluster.create(SandboxSpec(image=image, limits=_COPYING), "copy")
        try:
            data = await sandbox.pack(path, _LARGEST_TREE)
        finally:
            await sandbox.destroy()
        await asyncio.to_thread(_extract, data, target, image)

    @override
    async def stop(self) -> None:
        self._withdraw(self._base)
        try:
            await self._cluster.stop()
        finally:
            os.close(self._record)

    @override
    async def ended(self) -> str:
        return await asyncio.shield(self._cluster.pods.lost)

    @override
    def exposed(self, path: Path) -> Path | None:
        """Only what nodes mount of themselves is this machine's own."""
        prefix = Path(sys.base_prefix).resolve()
        shared = self._cluster.settings.runtime.via == "host_path"
        return prefix if shared and path.resolve().is_relative_to(prefix) else None

    @property
    def pids_limit(self) -> int | None:
        """Of a pod, set by its kubelet; None when it sets none."""
        return self._cluster.pids_limit


def _extract(data: bytes, target: Path, image: str) -> None:
    """Its links too, wherever they lead: nobody follows them, and nothing is written through one."""
    target.mkdir()
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(target, filter="tar")
    except tarfile.FilterError as error:
        raise ImageError(f"image {image}: the task's tree cannot be copied: {error}") from error


def _claim(base: Path, settings: Settings) -> int:
    base.mkdir(parents=True, exist_ok=True)
    record = os.open(base / _RECORD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(record)
        raise SandboxError(f"{base} belongs to a runner that is running: give this one a directory of its own") from None
    os.ftruncate(record, 0)
    os.pwrite(record, settings.model_dump_json().encode(), 0)
    return record


async def _sweep(base: Path, settings: Settings) -> list[str]:
    from . import sweeping
    from .api import Api
    from .cluster import owner_of

    api = await Api.connect(settings.kubernetes, 8)
    try:
        return await sweeping.sweep(api, owner_of(base), _GONE_S)
    finally:
        await api.close()
