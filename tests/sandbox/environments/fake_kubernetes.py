"""A small Kubernetes API server whose pods are real namespace sandboxes.

It copies what was seen of a real one: a phase that runs ahead of exec, watches that start where a list ended and end with 410 when that was
too long ago, names that are taken, deletion in two steps, an exec whose process survives its connection, a NetworkPolicy that is accepted
whether or not anything enforces it. Tests make it busy, make it forget, and make it lose things.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from sandbox.environments.namespace.host import Host

from .fake_kubernetes_node import Image, Node

Object = dict[str, Any]
NAMESPACE = "lego-test"


@dataclass
class Faults:
    """What is to go wrong."""

    answers: deque[tuple[str, int, dict[str, str]]] = field(default_factory=deque)
    """(method, status, headers) of answers that the next requests with that method get instead of theirs."""
    drop_creations: int = 0
    """Creations that happen, and whose answers are lost."""
    forget_events: bool = False
    """The next watch is told that its version is too old."""
    drop_execs: int = 0
    """Execs whose connection breaks with the first output."""
    away: bool = False
    """Nobody answers: connections end before the first word."""
    slow_exec_s: float = 0.05
    """How long after Running a container cannot be entered yet."""


class Store:
    """Objects, a version that grows with every change, and who wants to hear of it."""

    def __init__(self) -> None:
        self.version = 1
        self.objects: dict[tuple[str, str], Object] = {}
        self.watchers: list[tuple[str, asyncio.Queue[Object]]] = []
        self.events: list[tuple[int, str, Object]] = []

    def put(self, kind: str, item: Object, event: str) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        name = item["metadata"]["name"]
        if event == "DELETED":
            self.objects.pop((kind, name), None)
        else:
            self.objects[kind, name] = item
        news = {"type": event, "object": copy.deepcopy(item)}
        self.events.append((self.version, kind, news))
        for wanted, queue in self.watchers:
            if wanted == kind:
                queue.put_nowait(news)

    def listing(self, kind: str, selector: str) -> list[Object]:
        return [item for (of, _), item in self.objects.items() if of == kind and selected(item, selector)]


def selected(item: Object, selector: str) -> bool:
    labels = item["metadata"].get("labels", {})
    return all(labels.get(term.split("=")[0]) == term.split("=")[1] for term in selector.split(",") if term)


def status(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code}
    return web.json_response(body, status=code, headers=headers)


class FakeCluster:
    """`host` runs the pods. `enforce` is whether the cluster has a network plug-in that knows policies."""

    def __init__(self, host: Host, root: Path, images: dict[str, Image], enforce: bool = True) -> None:
        self.token = secrets.token_hex(16)
        self.faults = Faults()
        self.store = Store()
        self.requests: list[str] = []
        self.node = Node(host, root / "node", images, self.store, self.faults, enforce)
        self.kubeconfig = root / "kubeconfig"
        self._tasks: set[asyncio.Task[None]] = set()
        self.open: dict[asyncio.Transport, str] = {}

    @property
    def pods(self) -> dict[str, Object]:
        return {name: item for (kind, name), item in self.store.objects.items() if kind == "pods"}

    @property
    def policies(self) -> dict[str, Object]:
        return {name: item for (kind, name), item in self.store.objects.items() if kind == "networkpolicies"}

    def cut(self, what: str = "") -> int:
        """End the connections whose latest request had this in its address, as a proxy on the way does; how many."""
        cut = [transport for transport, path in self.open.items() if what in path and not transport.is_closing()]
        for transport in cut:
            transport.abort()
        self.open = {transport: path for transport, path in self.open.items() if not transport.is_closing()}
        return len(cut)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeCluster]:
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.kubeconfig.write_text(yaml.safe_dump(self._config(f"http://127.0.0.1:{port}")))
        try:
            yield self
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self.node.stop()
            await runner.cleanup()

    def _config(self, server: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": server}}],
            "users": [{"name": "runner", "user": {"token": self.token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "runner"}}],
            "current-context": "fake",
        }

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._guard])
        core, network = "/api/v1/namespaces/{ns}/{kind:pods}", "/apis/networking.k8s.io/v1/namespaces/{ns}/{kind:networkpolicies}"
        for path in (core, network):
            app.router.add_post(path, self._create)
            app.router.add_get(path, self._list)
            app.router.add_delete(path, self._delete_all)
            app.router.add_get(path + "/{name}", self._get)
            app.router.add_delete(path + "/{name}", self._delete)
        app.router.add_get(core + "/{name}/exec", self._exec)
        app.router.add_get("/api/v1/namespaces/{ns}/events", self._events)
        app.router.add_get("/version", self._version)
        app.router.add_get("/api/v1/nodes", self._nodes)
        app.router.add_get("/api/v1/namespaces/default/services/kubernetes", self._service)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        assert isinstance(request.transport, asyncio.Transport)
        if self.faults.away:
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        self.open[request.transport] = request.path_qs
        self.requests.append(f"{request.method} {request.path_qs}")
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return status(401, "Unauthorized", "Unauthorized")
        if request.match_info.get("ns", NAMESPACE) not in (NAMESPACE, "default"):
            return status(403, "Forbidden", f'pods is forbidden: User "runner" cannot do this in namespace {request.match_info["ns"]}')
        if self.faults.answers and self.faults.answers[0][0] == request.method:
            _, code, headers = self.faults.answers.popleft()
            return status(code, "Conflict" if code == 409 else "Fault", "a test wants it so", headers)
        return await handler(request)

    # ---------------------------------------------------------------- objects

    async def _create(self, request: web.Request) -> web.StreamResponse:
        kind, item = request.match_info["kind"], await request.json()
        name = item["metadata"]["name"]
        if (kind, name) in self.store.objects:
            return status(409, "AlreadyExists", f'{kind} "{name}" already exists')
        item["metadata"] |= {"namespace": NAMESPACE, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        if kind == "pods":
            item["status"] = {"phase": "Pending"}
            self.store.put(kind, item, "ADDED")
            self._spawn(self.node.run(item))
        else:
            self.store.put(kind, item, "ADDED")
            await self.node.apply_policies()
        if self.faults.drop_creations:
            self.faults.drop_creations -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(item, status=201)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        item = self.store.objects.get((request.match_info["kind"], request.match_info["name"]))
        return web.json_response(item) if item else self._absent(request)

    def _absent(self, request: web.Request) -> web.Response:
        return status(404, "NotFound", f'{request.match_info["kind"]} "{request.match_info["name"]}" not found')

    async def _list(self, request: web.Request) -> web.StreamResponse:
        kind, selector = request.match_info["kind"], request.query.get("labelSelector", "")
        if request.query.get("watch") == "true":
            return await self._watch(request, kind, selector)
        metadata = {"resourceVersion": str(self.store.version)}
        return web.json_response({"kind": "List", "metadata": metadata, "items": self.store.listing(kind, selector)})

    async def _watch(self, request: web.Request, kind: str, selector: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[Object] = asyncio.Queue()

        async def send(event: Object) -> None:
            await response.write(json.dumps(event).encode() + b"\n")

        if self.faults.forget_events:
            self.faults.forget_events = False
            await send(
                {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}}
            )
            return response
        self.store.watchers.append((kind, queue))
        for version, of, event in self.store.events:
            if of == kind and version > int(request.query.get("resourceVersion", "0")):
                queue.put_nowait(event)
        end = time.monotonic() + float(request.query.get("timeoutSeconds", "60"))
        try:
            while (left := end - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left):
                        event = await queue.get()
                except TimeoutError:
                    break
                if selected(event["object"], selector):
                    await send(event)
        finally:
            self.store.watchers.remove((kind, queue))
        return response

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        item = self.store.objects.get((request.match_info["kind"], request.match_info["name"]))
        if item is None:
            return self._absent(request)
        await self._remove(request.match_info["kind"], item, request.query.get("gracePeriodSeconds"))
        return web.json_response(item)

    async def _delete_all(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        for item in self.store.listing(kind, request.query.get("labelSelector", "")):
            await self._remove(kind, item, None)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _remove(self, kind: str, item: Object, grace: str | None) -> None:
        if kind != "pods":
            self.store.put(kind, item, "DELETED")
            await self.node.apply_policies()
            return
        seconds = int(grace) if grace is not None else item["spec"].get("terminationGracePeriodSeconds", 30)
        if seconds == 0:  # the object goes first, whatever runs
            self.store.put(kind, item, "DELETED")
            self._spawn(self.node.end(item["metadata"]["name"]))
        elif "deletionTimestamp" not in item["metadata"]:
            item["metadata"]["deletionTimestamp"] = _now()
            self.store.put(kind, item, "MODIFIED")
            self._spawn(self._terminate(item))

    async def _terminate(self, item: Object) -> None:
        await self.node.end(item["metadata"]["name"])
        if ("pods", item["metadata"]["name"]) in self.store.objects:
            self.store.put("pods", item, "DELETED")

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        item = self.store.objects.get(("pods", name))
        if item is None:
            return self._absent(request)
        if not self.node.can_enter(name):
            return status(500, "InternalError", f'container not found ("{request.query.get("container")}")')
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=1 << 20)
        await socket.prepare(request)
        await self.node.exec(name, request.query.getall("command"), socket)
        return socket

    # ---------------------------------------------------------------- facts

    async def _version(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"major": "1", "minor": "33+", "gitVersion": "v1.33.0-fake"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        name = request.query["fieldSelector"].split(",")[0].removeprefix("involvedObject.name=")
        return web.json_response({"items": [event for event in self.node.events if event["involved"] == name]})

    async def _nodes(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"items": [{"metadata": {"name": "node-1"}}, {"metadata": {"name": "old"}, "spec": {"unschedulable": True}}]}
        )

    async def _service(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"spec": {"clusterIP": "198.18.200.1", "ports": [{"port": 443}]}})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
