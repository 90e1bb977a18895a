"""A small Kubernetes API server with a KubeRay operator whose pods are processes of this machine.

The operator does what KubeRay does with a RayJob, as far as its user can tell: nothing before the Secret is there, the head's first
container, the runner beside the driver, the driver's words in the submitter's log, statuses in the words of `ray.io/v1`, and the end of all
of it when the object is deleted. By default driver and runner are the fakes of `tests/server/launchers`, and a directory is the claim.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import subprocess
import sys
import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TextIO

import psutil
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.trainer.support.served import Served

Object = dict[str, Any]
FAKES = Path(__file__).parents[2] / "server" / "launchers" / "fakes"
NAMESPACE = "rl"
NODE_TIME = timezone(timedelta(hours=2))
"""Logs carry the time of the node that wrote them."""


@dataclass
class Faults:
    """What is to go wrong."""

    kuberay: bool = True
    """Whether the cluster has the kind RayJob."""
    operator: bool = True
    forbidden: set[str] = field(default_factory=set)
    """`VERB RESOURCE` that the account may not do."""
    unknown_fields: bool = False
    """The definition of RayJob is an older one: `authOptions` is dropped in silence."""
    drop_creations: int = 0
    """Creations of jobs that happen, and whose answers are lost."""
    down: bool = False
    """Every answer is a 503."""
    pods: str = ""
    """Why no node has room."""
    image: str = ""
    """What the head's first container says before it fails."""
    quota: str = ""
    """What the operator's events say when it may not make pods."""


class FakeKubeRay:
    def __init__(self, root: Path) -> None:
        self.faults = Faults()
        self.objects: dict[tuple[str, str], Object] = {}
        self.events: list[Object] = []
        self.logs: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()
        self.programs = {
            "driver": [sys.executable, "-P", str(FAKES / "trainer.py")],
            "runner": [sys.executable, "-P", str(FAKES / "runner.py")],
        }
        self.volume = root / "volume"
        self.volume.mkdir(parents=True)
        self._token = secrets.token_hex(16)
        self._lock = threading.RLock()
        self._operators: list[threading.Thread] = []
        self._running: dict[str, list[subprocess.Popen[Any]]] = {}
        self._ending = threading.Event()
        core = "/api/v1/namespaces/{ns}/{kind}"
        rays = "/apis/ray.io/v1/namespaces/{ns}/{kind:str}"
        routes = [
            Route("/version", self._version),
            Route("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review, methods=["POST"]),
        ]
        for path in (core, rays):
            routes += [
                Route(path, self._create, methods=["POST"]),
                Route(path, self._list),
                Route(path + "/{name}", self._get),
                Route(path + "/{name}", self._delete, methods=["DELETE"]),
                Route(path + "/{name}/log", self._log),
            ]
        self._served = Served(Starlette(routes=routes))
        self.url = self._served.url
        self.kubeconfig = root / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(self._config()))
        self.add("persistentvolumeclaims", {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteMany"]}})

    def stop(self) -> None:
        self._ending.set()
        with self._lock:
            for name in list(self._running):
                self._end(name)
        for operator in self._operators:
            operator.join()
        self._served.stop()

    def add(self, kind: str, item: Object) -> Object:
        with self._lock:
            item["metadata"] = {"uid": str(uuid.uuid4()), "namespace": NAMESPACE} | item["metadata"]
            self.objects[kind, item["metadata"]["name"]] = item
        return item

    def names(self, kind: str) -> list[str]:
        with self._lock:
            return sorted(name for of, name in self.objects if of == kind)

    def job(self) -> Object:
        (name,) = self.names("rayjobs")
        return self.objects["rayjobs", name]

    def remove(self, name: str) -> None:
        """A job and what belongs to it."""
        with self._lock:
            job = self.objects.pop(("rayjobs", name))
            for (kind, other), item in list(self.objects.items()):
                owners = [owner["uid"] for owner in item["metadata"].get("ownerReferences", ())]
                if job["metadata"]["uid"] in owners:
                    del self.objects[kind, other]
            self._end(name)

    def _end(self, name: str) -> None:
        for process in self._running.pop(name, []):
            process.kill()
            process.wait()
        _kill_stray(self.volume / name.removeprefix("lego-rl-").rpartition("-")[0])

    def _config(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "launcher", "user": {"token": self._token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "launcher"}}],
            "current-context": "fake",
        }

    # ---------------------------------------------------------------- the operator

    def _operate(self, name: str) -> None:
        job = self.objects["rayjobs", name]
        self._status(name, jobDeploymentStatus="Initializing", rayClusterName=f"{name}-ray")
        if self.faults.quota:
            self.events.append({"on": f"{name}-ray", "type": "Warning", "reason": "FailedToCreateHeadPod", "message": self.faults.quota})
        head = self._pod(f"{name}-head", job, "headGroupSpec")
        while self._wanted(name) and (self.faults.pods or self.faults.quota or ("secrets", name) not in self.objects):
            refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.faults.pods}
            head["status"] = {"phase": "Pending", "conditions": [refused] if self.faults.pods else []}
            self._ending.wait(0.02)
        if not self._wanted(name):
            return
        words = shlex.split(job["spec"]["entrypoint"])
        run_dir = self.volume / Path(words[words.index("--run-dir") + 1]).name
        if not self._laid_out(job, run_dir, head):
            return
        runner = self._start(name, [*self.programs["runner"], "--run-dir", str(run_dir)])
        attempt = words[words.index("--attempt") : words.index("--attempt") + 2]
        driver = self._start(name, [*self.programs["driver"], "--run-dir", str(run_dir), *(attempt if attempt[1] != "1" else [])])
        submitter = self._pod(f"{name}-submitter", job, "submitterPodTemplate")
        for pod in (head, submitter):
            pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self._status(name, jobDeploymentStatus="Running", jobStatus="RUNNING")
        with self._output(name).open() as output:
            while driver.poll() is None:
                self._copy(output, f"{name}-submitter")
                self._ending.wait(0.02)
            self._copy(output, f"{name}-submitter")
        code = driver.returncode
        runner.kill()
        _kill_stray(run_dir)
        if self._wanted(name):
            message = f"Job entrypoint command failed with exit code {code}, last available logs (truncated to 20,000 chars):\n…"
            end = {"jobStatus": "SUCCEEDED"} if code == 0 else {"jobStatus": "FAILED", "reason": "AppFailed", "message": message}
            self._status(name, jobDeploymentStatus="Complete" if code == 0 else "Failed", **end)

    def _laid_out(self, job: Object, run_dir: Path, head: Object) -> bool:
        """The head's first container, for real."""
        name = job["metadata"]["name"]
        place = self.volume.parent / f"secret-{name}"
        place.mkdir(exist_ok=True)
        (place / "run.json").write_text(self.objects["secrets", name]["stringData"]["run.json"])
        template = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        (layout,) = template["initContainers"]
        sources = layout["command"][layout["command"].index("--sources") + 1]
        command = [sys.executable, *layout["command"][1:4], "--run-dir", str(run_dir), "--secret", str(place), "--sources", sources]
        done = subprocess.run(command, capture_output=True, text=True)
        said = self.faults.image or (done.stdout if done.returncode else "")
        if said:
            ended = {"exitCode": 1, "reason": "Error", "message": said}
            head["status"] = {"phase": "Pending", "initContainerStatuses": [{"name": "layout", "state": {"terminated": ended}}]}
        return not said

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with self._output(name).open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        with self._lock:
            if self._wanted(name):
                self._running.setdefault(name, []).append(process)
            else:
                process.kill()
        return process

    def _wanted(self, name: str) -> bool:
        return ("rayjobs", name) in self.objects and not self._ending.is_set()

    def _pod(self, name: str, job: Object, part: str) -> Object:
        spec = job["spec"]
        template = spec[part] if part in spec else spec["rayClusterSpec"][part]["template"]
        owner = {"uid": job["metadata"]["uid"]}
        return self.add("pods", {"metadata": template["metadata"] | {"name": name, "ownerReferences": [owner]}, "status": {}})

    def _status(self, name: str, **news: str) -> None:
        with self._lock:
            if ("rayjobs", name) in self.objects:
                self.objects["rayjobs", name].setdefault("status", {}).update(news)

    def _output(self, name: str) -> Path:
        return self.volume.parent / f"{name}.log"

    def _copy(self, output: TextIO, pod: str) -> None:
        for line in output.read().splitlines():
            self._say(pod, line)

    def _say(self, pod: str, line: str) -> None:
        """With nanoseconds, no two the same."""
        now = datetime.now(NODE_TIME)
        lines = self.logs.setdefault(pod, [])
        lines.append(f"{now:%Y-%m-%dT%H:%M:%S.%f}{len(lines) % 1000:03d}+02:00 {line}")

    # ---------------------------------------------------------------- the API

    def _refusal(self, http: Request, verb: str, resource: str) -> Response | None:
        self.counts[f"{verb} {resource}"] += 1
        if self.faults.down:
            return _status(503, "ServiceUnavailable", "a test wants it so")
        if http.headers.get("authorization") != f"Bearer {self._token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if http.path_params["ns"] != NAMESPACE or f"{verb} {resource}" in self.faults.forbidden:
            return _status(403, "Forbidden", f'{resource} is forbidden: User "launcher" cannot {verb} resource "{resource}"')
        if resource == "rayjobs" and not self.faults.kuberay:
            return PlainTextResponse("404 page not found", 404)
        return None

    async def _version(self, _: Request) -> Response:
        return _status(503, "ServiceUnavailable", "down") if self.faults.down else JSONResponse({"gitVersion": "v1.33.0-fake"})

    async def _review(self, http: Request) -> Response:
        asked = (await http.json())["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return JSONResponse({"status": {"allowed": f"{asked['verb']} {resource}" not in self.faults.forbidden}}, 201)

    async def _create(self, http: Request) -> Response:
        kind = http.path_params["kind"]
        if refusal := self._refusal(http, "create", kind):
            return refusal
        item = await http.json()
        name = item["metadata"]["name"]
        if self.faults.unknown_fields:
            item["spec"]["rayClusterSpec"].pop("authOptions")
        if http.query_params.get("dryRun") == "All":
            return JSONResponse(item, 201)
        with self._lock:
            if (kind, name) in self.objects:
                return _status(409, "AlreadyExists", f'{kind} "{name}" already exists')
            self.add(kind, item)
        if kind == "rayjobs":
            if self.faults.operator:
                self._operators.append(threading.Thread(target=self._operate, args=(name,), daemon=True))
                self._operators[-1].start()
            if self.faults.drop_creations:
                self.faults.drop_creations -= 1
                return _status(504, "Timeout", "the answer got lost")
        return JSONResponse(item, 201)

    async def _list(self, http: Request) -> Response:
        kind = http.path_params["kind"]
        if refusal := self._refusal(http, "list", kind):
            return refusal
        if kind == "events":
            wanted = dict(term.split("=") for term in http.query_params["fieldSelector"].split(","))
            return JSONResponse({"items": [event for event in self.events if event["on"] == wanted["involvedObject.name"]]})
        terms = [term.split("=") for term in http.query_params.get("labelSelector", "").split(",") if term]
        with self._lock:
            found = [item for (of, _), item in self.objects.items() if of == kind]
            text = json.dumps([item for item in found if all(item["metadata"].get("labels", {}).get(key) == value for key, value in terms)])
        return Response(f'{{"items": {text}}}', media_type="application/json")

    async def _get(self, http: Request) -> Response:
        kind, name = http.path_params["kind"], http.path_params["name"]
        if refusal := self._refusal(http, "get", kind):
            return refusal
        with self._lock:
            item = self.objects.get((kind, name))
            text = json.dumps(item)
        return Response(text, media_type="application/json") if item else _status(404, "NotFound", f'{kind} "{name}" not found')

    async def _log(self, http: Request) -> Response:
        name = http.path_params["name"]
        if refusal := self._refusal(http, "get", "pods/log"):
            return refusal
        if ("pods", name) not in self.objects:
            return _status(404, "NotFound", f'pods "{name}" not found')
        since = http.query_params.get("sinceTime")
        first = datetime.fromisoformat(since) if since else datetime.min.replace(tzinfo=UTC)
        lines = [line for line in self.logs.get(name, []) if datetime.fromisoformat(line.split(" ", 1)[0]) >= first]
        return PlainTextResponse("".join(f"{line}\n" for line in lines)[: int(http.query_params["limitBytes"])])

    async def _delete(self, http: Request) -> Response:
        kind, name = http.path_params["kind"], http.path_params["name"]
        if refusal := self._refusal(http, "delete", kind):
            return refusal
        item = self.objects.get((kind, name))
        if item is None:
            return _status(404, "NotFound", f'{kind} "{name}" not found')
        wanted = (await http.json()).get("preconditions", {}).get("uid")
        if wanted != item["metadata"]["uid"]:
            return _status(409, "Conflict", f"the UID in the precondition ({wanted}) does not match the UID in record")
        self.remove(name)
        return JSONResponse({"kind": "Status", "status": "Success"})


def _kill_stray(run_dir: Path) -> None:
    """A pod that ends takes along what left the driver's session."""
    if (run_dir / "stray").exists():
        with contextlib.suppress(psutil.NoSuchProcess):
            stray = psutil.Process(int((run_dir / "stray").read_text()))
            if "import time; time.sleep(600)" in stray.cmdline():
                stray.kill()


def _status(code: int, reason: str, message: str) -> Response:
    return JSONResponse({"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}, code)
