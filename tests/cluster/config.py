"""Configuration files of the cluster's parts, and the images that its node has."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.sandbox.environments.docker_engine import fill
from tests.sandbox.environments.images import layout

from .build import Programs

ADDRESS, PORT = "198.18.20.1", 16443
TOKEN = "only-reachable-in-this-network-namespace"
RUNNER_TOKEN = "of-the-account-that-docs-kubernetes-rbac-describes"
PAUSE, IMAGE, RUNTIME = "localhost/pause:1", "localhost/lego-rl/test:1", "localhost/lego-rl/runtime:1"


def write(state: Path, found: Programs) -> dict[str, str]:
    """Write every file below `state` and return their paths by what they are."""
    files = {name: str(state / name) for name in ("kubeconfig", "key", "root")}
    files["socket"] = str(state / "containerd.sock")
    files["tokens"] = _put(state / "tokens.csv", f'{TOKEN},admin,admin,"system:masters"\n{RUNNER_TOKEN},runner,runner\n')
    files["containerd"] = _put(state / "containerd.toml", _containerd(state, found))
    files["kubelet"] = _put(state / "kubelet.json", json.dumps(_kubelet(state)))
    files["images"] = " ".join(_images(state))
    (state / "cni").mkdir()
    _put(state / "cni/10-bridge.conflist", json.dumps(_network()))
    for name, token in (("kubeconfig", TOKEN), ("kubeconfig-runner", RUNNER_TOKEN)):
        _put(state / name, json.dumps(_way_in(state, token)))
    return files


def _way_in(state: Path, token: str) -> dict[str, object]:
    cluster = {"server": f"https://{ADDRESS}:{PORT}", "certificate-authority": f"{state}/certs/apiserver.crt"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def _put(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def _containerd(state: Path, found: Programs) -> str:
    return f"""version = 2
root = "{state}/containerd"
state = "{state}/containerd.run"
[grpc]
  address = "{state}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{found.tools}/usr/lib/cni"
    conf_dir = "{state}/cni"
"""


def _kubelet(state: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "failSwapOn": False,
        "maxOpenFiles": 20000,
        "resolvConf": str(state / "resolv.conf"),
        "clusterDNS": [],
    }


def _network() -> dict[str, object]:
    ipam = {"type": "host-local", "subnet": "198.18.30.0/24", "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": "lego", "plugins": [bridge]}


def _images(state: Path) -> list[str]:
    """The image that holds a pod's namespaces, one with some of this machine's programs and no Python, and one with that Python besides."""
    files, python = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=files, mode="w") as tar:
        fill(tar)
    with tarfile.open(fileobj=python, mode="w") as tar:
        tar.add(sys.base_prefix, sys.base_prefix.lstrip("/"), filter=_needed)
    sleeps = ("/bin/sleep", "1000000000")
    layout(state / "layout", [files.getvalue()], {"PATH": "/bin"}, "v1", sleeps)
    layout(state / "layout-runtime", [files.getvalue(), python.getvalue()], {"PATH": "/bin"}, "v1", sleeps)
    archives = []
    for number, (name, place) in enumerate(((PAUSE, "layout"), (IMAGE, "layout"), (RUNTIME, "layout-runtime"))):
        archives.append(str(state / f"image{number}.tar"))
        subprocess.run(
            [
                shutil.which("skopeo") or "skopeo",
                "--insecure-policy",
                "copy",
                "-q",
                f"oci:{state}/{place}:v1",
                f"docker-archive:{archives[-1]}:{name}",
            ],
            check=True,
        )
    return archives


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A Python without what only its makers use."""
    parts = Path(member.name).parts
    unused = {"test", "__pycache__", "site-packages", "idlelib", "ensurepip"} & {*parts}
    return None if unused or any(part.startswith("config-3") for part in parts) or member.name.endswith(".a") else member
