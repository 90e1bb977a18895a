"""The API server, through the official client: JSON in and out, errors classified here and nowhere else.

ClusterError         the server said no; `status` is its answer's
├── Absent           404: the object, or the kind of object, is not there
└── Busy             it may say yes later: 429, 5xx, no connection

Credentials come from a kubeconfig or the pod's service account and stay in the client: no message and no log has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import urllib3
import yaml
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException

from server.schemas.kuberay import KubeRay

from .manifest import GROUP, PLURAL, VERSION

Object = dict[str, Any]
RIGHTS = "give its account the rights that docs/kubernetes-rbac.yaml lists for the launcher"
_REQUEST_S = 10


class ClusterError(Exception):
    def __init__(self, message: str, status: int = 0, details: Object | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = details or {}
        """Of the Status object: `causes` names fields."""


class Absent(ClusterError):
    pass


class Busy(ClusterError):
    pass


class Cluster:
    """One namespace of one cluster."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.host: str = client.configuration.host

    @classmethod
    def connect(cls, settings: KubeRay) -> Cluster:
        """Nothing is asked yet. Raises ClusterError."""
        configuration = Configuration()
        configuration.retries = urllib3.Retry(0, redirect=0)
        try:
            if settings.kubeconfig is None:
                config.load_incluster_config(configuration)
            else:
                place = str(settings.kubeconfig.expanduser())
                config.load_kube_config(place, settings.context, client_configuration=configuration, persist_config=False)
        except (config.ConfigException, yaml.YAMLError, OSError, TypeError, ValueError) as error:
            source = settings.kubeconfig or "the service account of this pod"
            raise ClusterError(f"trainer.cluster.kubernetes: no way into a cluster by {source}: {type(error).__name__}") from error
        return cls(ApiClient(configuration), settings.namespace)

    def request(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None) -> Object:
        text = self.text(method, path, query, body)
        try:
            answer: Object = json.loads(text)
        except ValueError as error:
            raise Busy(f"{method} {path}: an answer that is not the API server's: {text.strip()[:100]!r}") from error
        return answer

    def text(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None) -> str:
        """One question, asked once. Raises ClusterError."""
        what = f"{method} {path.rpartition('/namespaces/')[2] or path}"
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        try:
            request = self._client.param_serialize(
                method, path, query_params=list((query or {}).items()), header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = self._client.call_api(*request, _request_timeout=_REQUEST_S)
            said = response.read().decode(errors="replace")
        except (urllib3.exceptions.HTTPError, OSError, ApiException) as error:
            raise Busy(f"{what}: no answer from the API server {self.host}: {type(error).__name__}") from error
        if not 200 <= response.status <= 299:
            raise refused(what, response.status, said)
        return said

    def path(self, kind: str, name: str = "") -> str:
        group = f"/apis/{GROUP}/{VERSION}" if kind == PLURAL else "/api/v1"
        return f"{group}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def get(self, kind: str, name: str) -> Object:
        return self.request("GET", self.path(kind, name))

    def create(self, kind: str, body: Object, *, dry: bool = False) -> Object:
        """`dry`: everything but keeping it. Unknown fields are refused by servers that can (1.25), and left out of the answer by others."""
        return self.request("POST", self.path(kind), {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry else {}), body)

    def items(self, kind: str, labels: str = "", fields: str = "") -> list[Object]:
        query = {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
        found: list[Object] = self.request("GET", self.path(kind), query)["items"]
        return found

    def delete(self, kind: str, name: str, uid: str) -> bool:
        """Ask for the end of this very object and all that belongs to it; False when it is gone, or another one has its name."""
        only = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            self.request("DELETE", self.path(kind, name), body=only)
        except ClusterError as error:
            if error.status in (404, 409):
                return False
            raise
        return True


def refused(what: str, status: int, body: str) -> ClusterError:
    """The error of an answer that is no success. `body` is a Status object, or what something in between said."""
    try:
        said = json.loads(body)
        words, reason, details = said.get("message", ""), said.get("reason", ""), said.get("details")
    except (ValueError, AttributeError):
        words, reason, details = body.strip()[:300], "", None
    message = f"{what}: the API server answers {status} {reason}: {words}".rstrip(": ")
    if status == 404:
        return Absent(message, status, details)
    if status == 429 or status >= 500:
        return Busy(message, status, details)
    if status in (401, 403) and "exceeded quota" not in words:
        message += f"; {RIGHTS}"
    return ClusterError(message, status, details)
