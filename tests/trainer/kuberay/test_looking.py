"""What is made of the words of KubeRay and of pods."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.launch import FAILED, FINAL
from trainer.launch.kuberay.looking import End, end_of, hopeless, is_queued, waits_for

Object = dict[str, Any]


def job(deployment: str, state: str = "", **more: str) -> Object:
    return {"status": {"jobDeploymentStatus": deployment, "jobStatus": state} | more}


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (job("Complete", "SUCCEEDED"), 0),
        (job("Failed", "FAILED", reason="AppFailed", message="Job entrypoint command failed with exit code 2, last available logs"), 2),
        (job("Failed", "FAILED", reason="AppFailed", message="Job entrypoint command failed with exit code -9, last available logs"), -9),
        (job("Failed", "FAILED", reason="AppFailed", message="Unexpected error occurred: The actor died"), FAILED),
        (job("Failed", "FAILED", message="exit code 0"), FAILED),
        (job("Failed", "", reason="SubmissionFailed", message="exit code 1 of something else"), FAILED),
        (job("Failed", "RUNNING", reason="DeadlineExceeded", message="too long"), FINAL),
        (job("Complete", "STOPPED", message="Job was intentionally stopped."), FINAL),
    ],
)
def test_how_a_job_ended(status: Object, code: int) -> None:
    end = end_of(status)
    assert end is not None and end.code == code
    assert bool(end.why) == ("exit code -9" not in str(status) and "exit code 2" not in str(status) and code != 0)


@pytest.mark.parametrize("deployment", ["", "Initializing", "Running", "Suspended", "Waiting", "Retrying"])
def test_a_job_goes_on_while_its_submission_is_not_over(deployment: str) -> None:
    """A terminal `jobStatus` alone is not the end: the submitter still prints."""
    assert end_of(job(deployment, "SUCCEEDED")) is None
    assert is_queued(job(deployment)) == (deployment == "Suspended")


def test_ends_are_values() -> None:
    assert end_of(job("Complete", "SUCCEEDED")) == End(0)


def pod(name: str, **status: Any) -> Object:
    return {"metadata": {"name": name, "labels": {"lego-rl/role": "worker"}}, "status": status}


READY = {"conditions": [{"type": "Ready", "status": "True"}]}
PULLING = {"containerStatuses": [{"name": "ray-worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]}
KILLED = {
    "containerStatuses": [
        {
            "name": "runner",
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
            "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
        }
    ]
}
EVENT = {"reason": "FailedCreate", "message": "exceeded\n quota"}


@pytest.mark.parametrize(
    ("status", "pods", "events", "words"),
    [
        ({}, [], [], "no operator has taken the job up yet"),
        (job("Suspended"), [], [], "suspended"),
        (job("Initializing"), [], [EVENT], "0 of 0 pods are ready; FailedCreate: exceeded quota"),
        (
            job("Initializing"),
            [pod("a", **READY), pod("b", **PULLING)],
            [EVENT],
            "1 of 2 pods are ready; pod b: ray-worker: ImagePull",
        ),
        (job("Running", "RUNNING"), [pod("a", **KILLED)], [], "CrashLoopBackOff: back-off 10s (before: OOMKilled, exit code 137)"),
        (job("Running", "RUNNING"), [pod("a", phase="Failed", reason="Evicted", message="low on memory")], [], "pod a failed: Evicted"),
        (job("Initializing"), [pod("a", **READY), pod("b")], [], "1 of 2 pods are ready"),
    ],
)
def test_what_a_job_waits_for(status: Object, pods: list[Object], events: list[Object], words: str) -> None:
    assert words in waits_for(status, pods, events)


def test_a_job_with_all_its_pods_waits_for_nothing() -> None:
    assert waits_for(job("Running", "RUNNING"), [pod("a", **READY)], [EVENT]) == ""


def test_only_a_first_container_that_failed_is_hopeless() -> None:
    refused = {"exitCode": 1, "message": "the image holds\nanother source"}
    for state in ({"state": {"terminated": refused}}, {"state": {"waiting": {}}, "lastState": {"terminated": refused}}):
        assert hopeless([pod("h", initContainerStatuses=[{"name": "layout"} | state])]) == "pod h: the image holds another source"
    for name, code in (("layout", 0), ("wait-gcs-ready", 1)):
        ended = {"name": name, "state": {"terminated": {"exitCode": code}}}
        assert hopeless([pod("h", initContainerStatuses=[ended])]) == ""
