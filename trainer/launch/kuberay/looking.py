"""What a RayJob and its pods say of themselves: whether it is over and how, else what it waits for. Pure; statuses by KubeRay's `v1`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import FAILED, FINAL
from .manifest import LAYOUT, ROLE, SUBMITTER

Object = dict[str, Any]
_OVER = ("Complete", "Failed")
_QUEUED = ("Suspending", "Suspended")
_ORDINARY = ("ContainerCreating", "PodInitializing")
_EXIT = re.compile(r"exit code (-?\d+)")
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class End:
    code: int
    """As the driver's own process would have ended."""
    why: str = ""
    """Where its log does not say it."""


def end_of(job: Object) -> End | None:
    """None while it goes on. KubeRay keeps Ray's message with the driver's exit code, and no code beside it."""
    status = job.get("status", {})
    if status.get("jobDeploymentStatus") not in _OVER:
        return None
    state, reason, message = status.get("jobStatus", ""), status.get("reason", ""), _line(status.get("message", ""))
    match state:
        case "SUCCEEDED":
            return End(0)
        case "STOPPED":
            return End(FINAL, f"somebody stopped the job in its Ray cluster: {message}")
    if reason == "DeadlineExceeded":
        return End(FINAL, f"the cluster's limit of time ended the job: {message}")
    exited = _EXIT.search(message) if state == "FAILED" else None
    if exited and int(exited[1]):
        return End(int(exited[1]))
    return End(FAILED, f"KubeRay says {reason or state or 'Failed'}: {message or 'and no more'}")


def is_queued(job: Object) -> bool:
    return job.get("status", {}).get("jobDeploymentStatus") in _QUEUED


def is_running(job: Object) -> bool:
    return job.get("status", {}).get("jobDeploymentStatus") == "Running" and job["status"].get("jobStatus") == "RUNNING"


def hopeless(pods: Iterable[Object]) -> str:
    """Why no pod will ever start, or "". The first container has looked at the image and refused it."""
    for pod in pods:
        for container in pod.get("status", {}).get("initContainerStatuses", ()):
            ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
            if container["name"] == LAYOUT and ended.get("exitCode"):
                said = _line(ended.get("message", "")) or ended.get("reason", "its first container failed")
                return f"pod {pod['metadata']['name']}: {said}"
    return ""


def waits_for(job: Object, pods: Sequence[Object], warnings: Sequence[Object]) -> str:
    """One line for people, "" when all is there. `warnings`: events about the job, its cluster and its submitter, oldest first."""
    if not job.get("status", {}).get("jobDeploymentStatus"):
        return "no operator has taken the job up yet: does KubeRay run in this cluster, for this namespace?"
    if is_queued(job):
        return "the job is suspended: a queue has not admitted it, or somebody suspended it"
    reasons = list(_reasons(pods))
    if not reasons and not is_running(job):
        reasons = [_line(f"{event.get('reason', '')}: {event.get('message', '')}") for event in warnings[-1:]]
    ready = sum(map(_is_ready, pods))
    if reasons:
        return f"{ready} of {len(pods)} pods are ready; {reasons[0]}"
    return "" if is_running(job) else f"{ready} of {len(pods)} pods are ready"


def _reasons(pods: Iterable[Object]) -> Iterator[str]:
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for condition in status.get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                yield _line(f"pod {name}: {condition.get('reason', '')}: {condition.get('message', '')}")
        for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            waiting, last = container.get("state", {}).get("waiting") or {}, container.get("lastState", {}).get("terminated") or {}
            if waiting.get("reason", _ORDINARY[0]) not in _ORDINARY:
                before = f" (before: {last.get('reason')}, exit code {last.get('exitCode')})" if last else ""
                yield _line(f"pod {name}: {container['name']}: {waiting['reason']}: {waiting.get('message', '')}{before}")
        if status.get("phase") == "Failed" and pod["metadata"].get("labels", {}).get(ROLE) != SUBMITTER:
            yield _line(f"pod {name} failed: {status.get('reason', '')}: {status.get('message', '')}")


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST].rstrip(": ")
