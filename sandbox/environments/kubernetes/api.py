"""The API server, through the official client's asyncio half: raw objects in and out, errors classified here and nowhere else.

ApiError             the server said no, or nothing; `status` is 0 without an answer
├── Absent           404: the object is gone
└── Busy             it may say yes later: 429, 5xx, a conflict, no connection, no quota left; tried again here until `patience` is over

Credentials come from a kubeconfig or the pod's service account and stay in the client: no message and no log has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.stream import WsApiClient

from sandbox.environments.errors import SandboxError
from server.schemas.kubernetes import Kubernetes

Object = dict[str, Any]
_REQUEST_S = 30
_CONNECT_S = 30
_PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_AUTH = ["BearerToken"]
_LEVEL = ("PodSecurity", "pod security policy")
"""What API servers say of a pod that its namespace does not take as it is."""


class ApiError(SandboxError):
    def __init__(self, message: str, status: int = 0, retry_after: float = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Absent(ApiError):
    pass


class Busy(ApiError):
    pass


def refused(what: str, status: int, body: str, retry_after: str = "") -> ApiError:
    """The error of an answer that is no success. `body` is a Status object, or what something in between said."""
    try:
        said = json.loads(body)
        words, reason = said.get("message", ""), said.get("reason", "")
    except (ValueError, AttributeError):
        words, reason = body.strip()[:300], ""
    message = f"{what}: the API server answers {status} {reason}: {words}".rstrip(": ")
    if status == 404:
        return Absent(message, status)
    # A conflict is no refusal: somebody changed what the request depends on, such as the count of a quota.
    if status == 429 or status >= 500 or (status == 403 and "exceeded quota" in words) or (status == 409 and reason == "Conflict"):
        return Busy(message, status, float(retry_after) if retry_after.isdigit() else 0)
    if status == 403 and any(sign in words for sign in _LEVEL):
        message += "; set the namespace's Pod Security level to baseline, or to privileged for sandbox.kubernetes.runtime.via: host_path"
    elif status in (401, 403):
        message += "; give the runner's account the rights that docs/kubernetes-rbac.yaml lists"
    return ApiError(message, status)


class Api:
    """One namespace of one cluster."""

    def __init__(self, client: ApiClient, streams: WsApiClient, namespace: str, refreshing: asyncio.Task[None] | None) -> None:
        self._client = client
        self._refreshing = refreshing
        self._streams = streams
        self.namespace = namespace
        self.host: str = client.configuration.host

    @classmethod
    async def connect(cls, settings: Kubernetes, streams: int) -> Api:
        """`streams` bounds how many connections are open at once. Nothing is asked yet. Raises SandboxError."""
        configuration, refreshing = Configuration(), None
        try:
            if settings.kubeconfig is None:
                config.load_incluster_config(configuration)
            else:
                loader = await config.load_kube_config(
                    str(settings.kubeconfig.expanduser()),
                    context=settings.context,
                    client_configuration=configuration,
                    persist_config=False,
                )
                # Tokens of credential plug-ins last minutes, a run lasts days.
                refreshing = asyncio.create_task(config.refresh_token(loader, configuration))
        except (config.ConfigException, yaml.YAMLError, OSError, TypeError, ValueError) as error:
            source = settings.kubeconfig or "the service account of this pod"
            raise SandboxError(f"sandbox.kubernetes: no way into a cluster by {source}: {type(error).__name__}") from error
        configuration.connection_pool_maxsize = streams
        return cls(ApiClient(configuration), WsApiClient(configuration), settings.namespace, refreshing)

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self._client.close()
        await self._streams.close()

    async def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None, patience: float = _PATIENCE_S
    ) -> Object:
        """The answer's object. What is busy is asked again, with pauses that grow and scatter, for `patience` seconds.

        A creation whose first answer was lost is found to exist: that is success.
        """
        end, pause, again = time.monotonic() + patience, _FIRST_PAUSE_S, False
        while True:
            try:
                return await self._once(method, path, query, body)
            except Busy as busy:
                wait = max(busy.retry_after, pause * random.uniform(0.5, 1.5))  # noqa: S311 -- no secret
                if time.monotonic() + wait > end:
                    raise
                await asyncio.sleep(wait)
                pause, again = min(2 * pause, _LONGEST_PAUSE_S), True
            except ApiError as error:
                if error.status == 409 and again and body is not None:
                    return await self._once("GET", f"{path}/{body['metadata']['name']}", None, None)
                raise

    async def _once(self, method: str, path: str, query: Mapping[str, str] | None, body: Object | None) -> Object:
        what = f"{method} {path.rpartition('/namespaces/')[2] or path}"
        try:
            request = await self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                auth_settings=_AUTH,
            )
            response = await self._client.call_api(*request, _request_timeout=_REQUEST_S)
            text = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ApiException) as error:
            raise Busy(f"{what}: no answer from the API server: {type(error).__name__}") from error
        if not 200 <= response.status <= 299:
            raise refused(what, response.status, text, response.headers.get("Retry-After", ""))
        answer: Object = json.loads(text)
        return answer

    def path(self, kind: str, name: str = "") -> str:
        group = "/apis/networking.k8s.io/v1" if kind == "networkpolicies" else "/api/v1"
        return f"{group}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    async def create(self, kind: str, body: Object) -> Object:
        return await self.request("POST", self.path(kind), body=body)

    async def get(self, kind: str, name: str) -> Object:
        return await self.request("GET", self.path(kind, name))

    async def listing(self, kind: str, selector: str) -> Object:
        return await self.request("GET", self.path(kind), {"labelSelector": selector})

    async def delete(self, kind: str, name: str, grace_s: int | None = None) -> bool:
        """Ask for the end of an object. False when there is none."""
        query = {} if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        try:
            await self.request("DELETE", self.path(kind, name), query)
        except Absent:
            return False
        return True

    async def delete_all(self, kind: str, selector: str) -> None:
        await self.request("DELETE", self.path(kind), {"labelSelector": selector})

    async def watch(self, kind: str, selector: str, version: str, seconds: int) -> AsyncIterator[Object]:
        """Events since `version`, for at most `seconds`. Raises ApiError; status 410 says that `version` is too old: list again."""
        query = [
            *(("watch", "true"), ("labelSelector", selector), ("resourceVersion", version)),
            *(("timeoutSeconds", str(seconds)), ("allowWatchBookmarks", "true")),
        ]
        try:
            request = await self._client.param_serialize(
                "GET", self.path(kind), query_params=query, header_params={"Accept": "application/json"}, auth_settings=_AUTH
            )
            response = await self._client.call_api(*request, _request_timeout=seconds + _REQUEST_S)
            if response.status != 200:
                raise refused(f"watch {kind}", response.status, (await response.read()).decode(errors="replace"))
            with contextlib.closing(response.response) as answer:
                while line := await answer.content.readline():
                    event: Object = json.loads(line)
                    if event["type"] == "ERROR":
                        raise refused(f"watch {kind}", int(event["object"].get("code", 500)), json.dumps(event["object"]))
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Busy(f"watch {kind}: the connection to the API server broke: {type(error).__name__}") from error

    async def exec(self, pod: str, command: list[str]) -> aiohttp.ClientWebSocketResponse:
        """The open streams of a new process in container `main` of a pod: standard input, output and error, and its status."""
        query = [("command", word) for word in command]
        query += [("container", "main"), *((name, "true") for name in ("stdin", "stdout", "stderr"))]
        try:
            async with asyncio.timeout(_CONNECT_S):
                request = await self._streams.param_serialize(
                    "GET",
                    self.path("pods", pod) + "/exec",
                    query_params=query,
                    header_params={"sec-websocket-protocol": "v4.channel.k8s.io"},
                    auth_settings=_AUTH,
                )
                response = await self._streams.call_api(*request, _preload_content=False)
                socket: aiohttp.ClientWebSocketResponse = await response.response
        except aiohttp.WSServerHandshakeError as error:
            raise refused(f"exec in pod {pod}", error.status, error.message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Busy(f"exec in pod {pod}: no answer from the API server: {type(error).__name__}") from error
        return socket
