"""Inside the namespaces: etcd, the control plane, containerd and a kubelet, and then the command.

Addresses are of 198.18.0.0/15, which is for tests (RFC 2544). Pods are on a plain bridge; `policy` enforces what policies say of egress.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from sandbox.environments.namespace import kernel

from .admission import PRIVILEGED
from .build import Programs
from .config import ADDRESS, PORT, TOKEN, write
from .parts import record
from .policy import Object, enforce

MARK = "LEGO_TEST_CLUSTER"
"""Tells a test that the cluster is this one. KUBECONFIG alone may name somebody's own."""
_READY_S = 180
_TAIL = 15


class NotUp(Exception):
    """A part of the cluster did not come up; the message holds the end of its log."""


class Node:
    def __init__(self, programs: Programs, state: Path) -> None:
        self._programs = programs
        self._state = state
        self._parts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        log = (self._state / f"{name}.log").open("wb")
        with log:
            self._parts[name] = subprocess.Popen(
                [name, *arguments], cwd=self._state, env=self._programs.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        record(self._state, name, [name, *arguments], self._programs.env, self._parts[name].pid)

    def until(self, what: str, part: str, true: Callable[[], bool]) -> None:
        """Wait until `true`; raises NotUp when the part ends or the time does."""
        end = time.monotonic() + _READY_S
        while not true():
            ended = [name for name, process in self._parts.items() if process.poll() is not None]
            if ended or time.monotonic() > end:
                name = ended[0] if ended else part
                log = (self._state / f"{name}.log").read_text(errors="replace").splitlines()[-_TAIL:]
                raise NotUp(f"{what}: {name} {'ended' if ended else 'took too long'}\n" + "\n".join(log))
            time.sleep(0.2)

    def call(self, *argv: str) -> None:
        done = subprocess.run(argv, cwd=self._state, env=self._programs.env, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotUp(f"{' '.join(argv)}: {done.stderr[-1000:]}")


def serve(programs: Programs, state: Path, settings: dict[str, str], command: list[str]) -> int:
    """Bring the cluster up, run the command with KUBECONFIG, and return its exit status."""
    node, api = Node(programs, state), Api(state)
    started = time.monotonic()
    try:
        _surroundings(node, state, settings)
        files = write(state, programs)
        _control_plane(node, api, files)
        enforce(api.get, programs.env)
        _machine(node, api, files)
    except NotUp as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    print(f"cluster: up after {time.monotonic() - started:.1f} s", flush=True)
    return subprocess.run(command, env=os.environ | {"KUBECONFIG": files["kubeconfig"], MARK: files["kubeconfig"]}).returncode


def _surroundings(node: Node, state: Path, settings: dict[str, str]) -> None:
    """The file system and the network as this cluster sees them."""
    kernel.make_private("/")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for name, value in settings.items():  # what a kubelet wants to find, so that it writes nothing
        wanted = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
        copy = state / f"setting-{name.replace('/', '-')}"
        copy.write_text(wanted.get(name, value))
        kernel.bind(str(copy), f"/proc/sys/{name}", 0)
    if Path("/sys/fs/cgroup/unified").is_dir():
        kernel.unmount("/sys/fs/cgroup/unified")
    (state / "resolv.conf").touch()
    kernel.bind(str(state / "resolv.conf"), "/etc/resolv.conf", 0)
    node.call("mount", "--make-rshared", "/")
    for line in (
        "link set lo up",
        "link add node0 type veth peer name node1",
        f"addr add {ADDRESS}/24 dev node0",
        "link set node0 up",
        "link set node1 up",
        "route add default dev node0",
    ):
        node.call("ip", *line.split())
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _control_plane(node: Node, api: Api, files: dict[str, str]) -> None:
    node.call("openssl", "genrsa", "-out", files["key"], "2048")
    client, peer = "http://127.0.0.1:12379", "http://127.0.0.1:12380"
    node.start(
        *("etcd", "--data-dir", "etcd", "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer),
        *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", "--unsafe-no-fsync"),
    )
    node.start(
        *("kube-apiserver", f"--etcd-servers={client}", f"--secure-port={PORT}", f"--bind-address={ADDRESS}", "--cert-dir=certs"),
        *(
            f"--advertise-address={ADDRESS}",
            f"--service-account-key-file={files['key']}",
            f"--service-account-signing-key-file={files['key']}",
        ),
        *("--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={files['tokens']}", "--authorization-mode=RBAC"),
        *("--service-cluster-ip-range=198.18.200.0/24", "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP"),
        *("--enable-admission-plugins=NodeRestriction,PodSecurityPolicy", "--disable-admission-plugins=ServiceAccount"),
    )
    node.until("the API server", "kube-apiserver", lambda: api.read("/readyz") == b"ok")
    api.create("/apis/policy/v1beta1/podsecuritypolicies", PRIVILEGED)
    node.start("kube-scheduler", f"--kubeconfig={files['kubeconfig']}", "--leader-elect=false", "--bind-address=127.0.0.1", "--port=0")
    node.start(
        *("kube-controller-manager", f"--kubeconfig={files['kubeconfig']}", "--leader-elect=false", "--bind-address=127.0.0.1", "--port=0"),
        *(f"--service-account-private-key-file={files['key']}", "--controllers=*,-nodeipam,-cloud-node-lifecycle,-service,-route"),
    )


def _machine(node: Node, api: Api, files: dict[str, str]) -> None:
    node.start("containerd", "--config", files["containerd"])
    node.until("containerd", "containerd", lambda: Path(files["socket"]).exists())
    for archive in files["images"].split():
        node.call("ctr", "--address", files["socket"], "--namespace", "k8s.io", "images", "import", archive)
    node.start(
        *("kubelet", f"--config={files['kubelet']}", f"--kubeconfig={files['kubeconfig']}", "--container-runtime=remote"),
        *(f"--container-runtime-endpoint=unix://{files['socket']}", f"--root-dir={files['root']}", f"--cert-dir={files['root']}/pki"),
        *("--hostname-override=node1", f"--node-ip={ADDRESS}"),
    )
    node.until("the node", "kubelet", api.node_ready)


class Api:
    """The API server as its administrator sees it."""

    def __init__(self, state: Path) -> None:
        self._certificate = state / "certs/apiserver.crt"

    def read(self, path: str) -> bytes:
        """An answer, or nothing where none came."""
        try:
            return self._ask(path, None)
        except OSError:
            return b""

    def create(self, path: str, item: Object) -> None:
        self._ask(path, json.dumps(item).encode())

    def _ask(self, path: str, body: bytes | None) -> bytes:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"https://{ADDRESS}:{PORT}{path}", body, headers)
        context = ssl.create_default_context(cafile=self._certificate)
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:  # noqa: S310
            return bytes(answer.read())

    def get(self, path: str) -> Object:
        found: Object = json.loads(self.read(path) or b"{}")
        return found

    def node_ready(self) -> bool:
        conditions = [found for node in self.get("/api/v1/nodes").get("items", []) for found in node["status"].get("conditions", [])]
        return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)
