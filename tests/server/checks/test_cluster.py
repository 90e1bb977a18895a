"""Rules of a run that goes to a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from server.checks.cluster import CLUSTER_RULES, reachable
from server.checks.facts import Answer, Facts
from server.schemas.checks import Check, Level
from server.schemas.probes import ClusterFacts, Trouble
from server.schemas.runspec import RunSpec
from server.spec import resolve

from .test_rules import SOUND

TAKES = replace(SOUND, cluster=Answer(ClusterFacts(version="v1.33.1")), listens="http://127.0.0.1:8420")
EVERYWHERE = replace(TAKES, loopback=False)
"""Listens on 0.0.0.0, which it knows as 127.0.0.1."""


def in_cluster(**more: Any) -> RunSpec:
    kubernetes = {"image": "r.example/x@sha256:" + "a" * 64, "runs": "runs"} | more
    overrides = {
        "trainer.launcher": "kubernetes",
        "trainer.start": "plain",
        "trainer.cluster.ray": "auto",
        "sandbox.environment": "kubernetes",
    }
    return resolve({"extends": "local"}, overrides | {"sandbox.environment": "kubernetes", "trainer.cluster.kubernetes": kubernetes}).spec


def reach(facts: Facts, server: str = "") -> Check:
    (check,) = reachable(in_cluster(server=server), facts)
    return check


@pytest.mark.parametrize(
    ("facts", "server", "level", "message"),
    [
        (TAKES, "", Level.ERROR, "this server listens on http://127.0.0.1:8420, which in a pod is the pod itself"),
        (TAKES, "http://localhost:8420", Level.ERROR, "trainer.cluster.kubernetes.server is http://localhost:8420, which in a pod"),
        (TAKES, "http://[::1]:8420", Level.ERROR, "which in a pod is the pod itself"),
        (TAKES, "http://10.0.0.7:8420", Level.ERROR, "listens on http://127.0.0.1:8420 and does not answer for the host 10.0.0.7"),
        (replace(TAKES, hostnames=("Control.example",)), "https://control.example", Level.OK, "pods report to https://control.example"),
        (EVERYWHERE, "", Level.ERROR, "pods do not know by which address they reach this server"),
        (EVERYWHERE, "http://10.0.0.7:8420", Level.WARNING, "go to http://10.0.0.7:8420 unencrypted"),
        (replace(EVERYWHERE, listens="http://10.0.0.7:8420"), "", Level.WARNING, "go to http://10.0.0.7:8420 unencrypted"),
        (EVERYWHERE, "https://control.example", Level.OK, "pods report to https://control.example"),
    ],
)
def test_pods_must_reach_this_server(facts: Facts, server: str, level: Level, message: str) -> None:
    check = reach(facts, server)
    assert check.level is level and message in check.message
    if level is Level.ERROR:
        assert "--host 0.0.0.0 --public" in check.fix or "set trainer.cluster.kubernetes.server to http://ADDRESS:8420" in check.fix


def test_every_trouble_of_the_cluster_is_an_error_with_what_to_do() -> None:
    troubles = [Trouble(where="KubeRay", message="the cluster knows no RayJob", fix="install it")]
    facts = replace(TAKES, cluster=Answer(ClusterFacts(version="v1.33.1", troubles=troubles)))
    checks = [check for rule in CLUSTER_RULES for check in rule(in_cluster(), facts) if check.code == "cluster"]
    assert [(check.level, check.where, check.fix) for check in checks] == [(Level.ERROR, "KubeRay", "install it")]


def test_a_trainer_that_cannot_ask_is_said() -> None:
    facts = replace(TAKES, cluster=Answer(None, "No module named kubernetes"))
    (check,) = (check for rule in CLUSTER_RULES for check in rule(in_cluster(), facts) if check.code == "cluster")
    assert check.level is Level.ERROR and "No module named kubernetes" in check.message and "--extra trainer" in check.fix
