"""What the words in a pod's status mean, and what the answers of an API server do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.environments.errors import ImageError, SandboxError
from sandbox.environments.kubernetes.api import Absent, ApiError, Busy, refused
from sandbox.environments.kubernetes.pods import Blame, Unstartable, ended, is_ready, obstacle, waits_for

LOW_NODE = "The node was low on resource: ephemeral-storage. Container main was using 90Mi, which exceeds its request of 0."


def pod(phase: str = "Running", ready: bool = True, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "task:1", "ready": ready, "state": state or {"running": {}}}
    return {"metadata": {"name": "p"}, "status": {"phase": phase, "containerStatuses": [container], **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return pod("Pending", False, {"waiting": {"reason": reason, "message": message}})


def test_ready_is_more_than_running() -> None:
    assert is_ready(pod())
    assert not is_ready(pod(ready=False))
    assert not is_ready({"metadata": {"name": "p"}, "status": {"phase": "Running"}})
    leaving = pod()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not is_ready(leaving)


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"])
def test_an_image_that_is_not_there_is_the_images_fault(reason: str) -> None:
    found = obstacle(waiting(reason, "manifest unknown"))
    assert isinstance(found, ImageError)
    assert "task:1" in str(found)


def test_a_registry_that_is_busy_is_not() -> None:
    assert obstacle(waiting("ErrImagePull", "429 Too Many Requests")) is None
    found = obstacle(waiting("ImagePullBackOff", "toomanyrequests: slow down"))
    assert isinstance(found, SandboxError)
    assert not isinstance(found, ImageError)


def test_an_image_may_be_called_like_a_busy_registry() -> None:
    named = waiting("ErrImagePull", "timeout-503: manifest unknown")
    named["status"]["containerStatuses"][0]["image"] = "timeout-503"
    assert isinstance(obstacle(named), ImageError)


def test_an_init_container_is_looked_at_too() -> None:
    status = {"initContainerStatuses": [{"name": "runtime", "image": "tools:1", "state": {"waiting": {"reason": "ErrImageNeverPull"}}}]}
    found = obstacle({"metadata": {"name": "p"}, "status": {"phase": "Pending", **status}})
    assert isinstance(found, ImageError)
    assert "tools:1" in str(found)


def test_a_container_that_cannot_start_says_why() -> None:
    found = obstacle(waiting("CreateContainerError", 'exec: "/opt/python": no such file'))
    assert isinstance(found, Unstartable)
    assert "no such file" in str(found)
    assert obstacle(waiting("ContainerCreating")) is None
    assert obstacle(pod("Pending", False, {})) is None


def test_what_a_pod_waits_for() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient memory."}
    assert "Insufficient memory" in waits_for(pod("Pending", False, {}, conditions=[condition]))
    assert waits_for(waiting("ContainerCreating")) == "ContainerCreating"


@pytest.mark.parametrize(
    ("status", "blame", "memory", "disk"),
    [
        (pod("Failed", False, {"terminated": {"reason": "OOMKilled", "exitCode": 137}}), Blame.AGENT, True, False),
        (
            pod("Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds the total limit of containers 64Mi."),
            *(Blame.AGENT, False, True),
        ),
        (
            pod("Failed", reason="Evicted", message='Usage of EmptyDir volume "scratch-0" exceeds the limit "16Mi".'),
            Blame.AGENT,
            False,
            True,
        ),
        (pod("Failed", reason="Evicted", message=LOW_NODE), Blame.CLUSTER, False, False),
        (
            pod("Failed", reason="Evicted", message='Container main exceeded its local ephemeral storage limit "1Mi".'),
            Blame.AGENT,
            False,
            True,
        ),
        (pod("Failed", reason="DeadlineExceeded", message="Pod was active on the node longer than …"), Blame.CLUSTER, False, False),
        (pod("Failed", reason="NodeLost"), Blame.CLUSTER, False, False),
        (pod("Running", False, {"terminated": {"reason": "Error", "exitCode": 1}}), Blame.CLUSTER, False, False),
    ],
)
def test_whose_doing_an_end_was(status: dict[str, Any], blame: Blame, memory: bool, disk: bool) -> None:
    end = ended(status)
    assert end is not None
    assert (end.blame, end.out_of_memory, end.disk_full) == (blame, memory, disk)
    assert end.words


def test_a_running_pod_has_not_ended() -> None:
    assert ended(pod()) is None
    assert ended({"metadata": {"name": "p"}}) is None


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, '{"reason": "NotFound", "message": "pods \\"x\\" not found"}', Absent),
        (429, "{}", Busy),
        (500, "oops", Busy),
        (503, "", Busy),
        (403, '{"message": "exceeded quota: compute"}', Busy),
        (403, '{"message": "pods is forbidden: User \\"x\\" cannot create"}', ApiError),
        (401, "Unauthorized", ApiError),
        (409, '{"reason": "AlreadyExists"}', ApiError),
        (409, '{"reason": "Conflict", "message": "Operation cannot be fulfilled on resourcequotas \\"compute\\": modified"}', Busy),
        (422, '{"message": "spec.containers: Required value"}', ApiError),
        (410, '{"reason": "Expired"}', ApiError),
    ],
)
def test_answers_have_classes(status: int, body: str, kind: type[ApiError]) -> None:
    error = refused("POST lego-rl/pods", status, body)
    assert type(error) is kind
    assert error.status == status


def test_a_refusal_says_what_to_change() -> None:
    level = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    assert "Pod Security level to baseline" in str(refused("POST pods", 403, json.dumps({"message": level})))
    assert "docs/kubernetes-rbac.yaml" in str(refused("POST pods", 403, '{"message": "User x cannot create"}'))


def test_a_server_that_says_when_is_asked_then() -> None:
    assert refused("GET x", 429, "{}", "7").retry_after == 7
    assert refused("GET x", 429, "{}", "Wed, 21 Oct 2026 07:28:00 GMT").retry_after == 0


@given(st.integers(300, 599), st.text(max_size=50))
def test_any_answer_is_some_error(status: int, body: str) -> None:
    assert str(status) in str(refused("GET x", status, body))
