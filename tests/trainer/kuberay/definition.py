"""A CustomResourceDefinition of RayJob: the published fields of `ray.io/v1` that lego-rl writes, with their types, and no others, so that a
server drops what is misspelt. What is inside pod templates is the server's own kind, and tested as pods."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def _object(required: tuple[str, ...] = (), **fields: Object) -> Object:
    return {"type": "object", "properties": fields} | ({"required": list(required)} if required else {})


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "format": "int32"}, {"type": "boolean"}
ANYTHING: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
TEMPLATE = _object(metadata=ANYTHING, spec=ANYTHING)
PARAMETERS: Object = {"type": "object", "additionalProperties": TEXT}


def rayjob_definition(*, auth: bool = True) -> Object:
    """`auth`: KubeRay 1.5.1 or newer, which knows `authOptions`."""
    head = _object(("template",), serviceType=TEXT, enableIngress=FLAG, rayStartParams=PARAMETERS, template=TEMPLATE)
    group = _object(
        ("groupName", "minReplicas", "maxReplicas", "template"),
        groupName=TEXT,
        replicas=NUMBER,
        minReplicas=NUMBER,
        maxReplicas=NUMBER,
        numOfHosts=NUMBER,
        rayStartParams=PARAMETERS,
        template=TEMPLATE,
    )
    known = {"authOptions": _object(mode={"type": "string", "enum": ["disabled", "token"]})} if auth else {}
    cluster = _object(
        ("headGroupSpec",),
        rayVersion=TEXT,
        enableInTreeAutoscaling=FLAG,
        headGroupSpec=head,
        workerGroupSpecs={"type": "array", "items": group},
        **known,
    )
    spec = _object(
        entrypoint=TEXT,
        submissionMode=TEXT,
        backoffLimit=NUMBER,
        submitterConfig=_object(backoffLimit=NUMBER),
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        submitterPodTemplate=TEMPLATE,
        rayClusterSpec=cluster,
    )
    status = _object(jobStatus=TEXT, jobDeploymentStatus=TEXT, reason=TEXT, message=TEXT, rayClusterName=TEXT)
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": _object(spec=spec, status=status)},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayjobs.ray.io"},
        "spec": {
            "group": "ray.io",
            "scope": "Namespaced",
            "names": {"plural": "rayjobs", "singular": "rayjob", "kind": "RayJob", "listKind": "RayJobList"},
            "versions": [version],
        },
    }
