"""What the cluster says about our pods: one watch for all of them, and what the words in a pod's status mean to us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sandbox.environments.errors import ImageError, SandboxError, SandboxLost

from .api import Api, ApiError, Object

log = logging.getLogger(__name__)

_WATCH_S = 300
_PAUSE_S = 1.0
_GIVE_UP_S = 300
_GONE = 410
_TRANSIENT_PULL = ("429", "toomanyrequests", "timeout", "timed out", "connection re", "temporary", "503", "502", "eof")
_IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable"}
_OWN_LIMITS = ("exceeds the limit", "exceeds the total limit", "exceeded its local ephemeral storage limit")
"""What a kubelet says of a pod that it evicts for what the pod itself did; a node in need says other things."""
_BROKEN_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff", "PreCreateHookError"}


class Unstartable(SandboxError):
    """A pod's image is there, but not what is to be run in it."""


class Blame(Enum):
    """Whose doing the end of a pod was."""

    AGENT = "agent"
    CLUSTER = "cluster"


@dataclass(frozen=True)
class End:
    """Why a pod's container runs no more."""

    words: str
    blame: Blame
    out_of_memory: bool = False
    disk_full: bool = False


def is_ready(pod: Object) -> bool:
    """Exec works: `phase` alone may say Running before, and goes on to say it while a pod is on its way out."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses") or [{}]
    return status.get("phase") == "Running" and bool(containers[0].get("ready")) and "deletionTimestamp" not in pod["metadata"]


def obstacle(pod: Object) -> SandboxError | None:
    """Why a pod that is not ready will not become so; None while there is hope."""
    if end := ended(pod):
        return SandboxError(f"the pod ended before it was ready: {end.words}")
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = container.get("state", {}).get("waiting") or {}
        reason, words = waiting.get("reason", ""), waiting.get("message", "")
        text = f"image {container.get('image', '?')}: {reason}: {words}".rstrip(": ")
        if reason in _IMAGE_REASONS:
            said = words.lower().replace(container.get("image", "").lower() or "\0", "")  # which may be called anything
            if any(sign in said for sign in _TRANSIENT_PULL):
                return None if reason == "ErrImagePull" else SandboxError(f"{text}; the registry may answer later")
            # The first failure names the reason, the next state hides it: wait for neither.
            return ImageError(f"{text}; is it in the registry, and may the cluster pull it? (sandbox.kubernetes.mirrors, pull_secrets)")
        if reason in _BROKEN_REASONS:
            return Unstartable(f"the container cannot start: {reason}: {words}")
    return None


def waits_for(pod: Object) -> str:
    """What a pod that is not ready waits for, in the cluster's words."""
    conditions = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"no node has room: {scheduled.get('message', scheduled.get('reason', ''))}"
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if waiting := container.get("state", {}).get("waiting"):
            return f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
    return "the node has not said anything about it"


def ended(pod: Object) -> End | None:
    """Why a pod's container is over, and by whose doing: what exceeds its own limits is the agent's, what a node lacks is the cluster's."""
    status = pod.get("status", {})
    words = f"{status.get('reason', '')}: {status.get('message', '')}".strip(": ")
    if status.get("reason") == "Evicted":
        message = status.get("message", "")
        own = "The node" not in message and any(sign in message for sign in _OWN_LIMITS)
        return End(words, Blame.AGENT if own else Blame.CLUSTER, disk_full=own)
    for container in status.get("containerStatuses") or []:
        over = container.get("state", {}).get("terminated")
        if over and over.get("reason") == "OOMKilled":
            return End("out of memory: the kernel ended the whole container", Blame.AGENT, out_of_memory=True)
        if over and status.get("phase") != "Failed":
            return End(f"its process 1 ended: {over.get('reason', '')} {over.get('exitCode', '')}".strip(), Blame.CLUSTER)
    if status.get("phase") in ("Failed", "Succeeded"):
        return End(words or "its process 1 ended", Blame.CLUSTER)
    return None


class Pods:
    """The latest state of every pod of an owner, kept by one watch. `follow` comes before a pod is made, `forget` after it is gone."""

    def __init__(self, api: Api, selector: str) -> None:
        self._api = api
        self._selector = selector
        self._known: dict[str, Object | None] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with why when the API server has not been heard for long."""

    async def start(self) -> None:
        version = await self._list()
        self._task = asyncio.create_task(self._watch(version), name="pods")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def follow(self, name: str) -> None:
        self._known[name] = {}
        self._changed[name] = asyncio.Event()

    def forget(self, name: str) -> None:
        self._known.pop(name, None)
        if event := self._changed.pop(name, None):
            event.set()

    def see(self, pod: Object) -> None:
        """News from elsewhere: the answer to a creation."""
        self._update(pod["metadata"]["name"], pod)

    def latest(self, name: str) -> Object | None:
        """{} for one that has not been seen yet, None for one that is gone."""
        return self._known.get(name)

    async def wait[T](self, name: str, look: Callable[[Object | None], T | None], seconds: float) -> T:
        """The first answer of `look` at the states of a pod that is not None. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                event = self._changed.get(name)
                if event is None:
                    raise SandboxLost(f"pod {name} is gone")
                event.clear()
                found = look(self._known.get(name))
                if found is not None:
                    return found
                await event.wait()

    def _update(self, name: str, pod: Object | None) -> None:
        if name in self._known:
            self._known[name] = pod
            self._changed[name].set()

    async def _list(self) -> str:
        answer = await self._api.listing("pods", self._selector)
        there = {pod["metadata"]["name"]: pod for pod in answer["items"]}
        for name, before in list(self._known.items()):
            if name in there or before:  # one that has not been seen yet is not gone
                self._update(name, there.get(name))
        version: str = answer["metadata"]["resourceVersion"]
        return version

    async def _watch(self, version: str) -> None:
        heard = time.monotonic()
        while True:
            try:
                if not version:
                    version = await self._list()
                async for event in self._api.watch("pods", self._selector, version, _WATCH_S):
                    heard = time.monotonic()
                    metadata: dict[str, Any] = event["object"]["metadata"]
                    version = metadata["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._update(metadata["name"], None if event["type"] == "DELETED" else event["object"])
                heard = time.monotonic()
            except ApiError as error:
                version = ""
                if error.status == _GONE:
                    continue
                log.warning("%s; the pods are listed again", error)
                silence = time.monotonic() - heard
                if silence > _GIVE_UP_S and not self.lost.done():
                    self.lost.set_result(f"the API server has not answered for {silence:.0f} s: {error}")
                await asyncio.sleep(_PAUSE_S)
