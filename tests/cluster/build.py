"""Programs of a Kubernetes cluster, built once into a cache outside the repository; nothing is installed on the machine.

Debian has no binary of the control plane or the kubelet, but their source: its package `kubernetes` (1.20.2 in Debian 12) holds all that it
needs to be built without a network. etcd, containerd, runc and the CNI plug-ins are unpacked from their packages. About nine CPU minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
_GO = ("golang-1.19-go", "golang-1.19-src", "rsync", "libpopt0", "libxxhash0")
_RUN = (
    *("etcd-server", "containerd", "runc", "containernetworking-plugins", "libseccomp2", "iptables", "libxtables12", "libnftnl11"),
    *("nftables", "libnftables1", "libedit2", "libjansson4", "libmnl0", "libbsd0", "libmd0", "libgmp10"),
)
_REFLECT = "golang-github-modern-go-reflect2-dev"
"""The release (1.0.2) that knows maps as Go has had them since 1.18: with the one in Kubernetes' source an API server built by a newer Go
crashes at the first custom resource."""
_VERSION = {
    "KUBE_GIT_VERSION": "v1.20.2",
    "KUBE_GIT_MAJOR": "1",
    "KUBE_GIT_MINOR": "20",
    "KUBE_GIT_TREE_STATE": "clean",
    "KUBE_GIT_COMMIT": "debian",
}


@dataclass(frozen=True)
class Programs:
    """Where they lie: `bin` what was built, `tools` a root directory of unpacked packages."""

    bin: Path
    tools: Path

    @property
    def env(self) -> dict[str, str]:
        path = [self.bin, *(self.tools / "usr" / name for name in ("bin", "sbin"))]
        return {
            "PATH": ":".join([*map(str, path), os.environ["PATH"]]),
            "LD_LIBRARY_PATH": ":".join(str(self.tools / place / "x86_64-linux-gnu") for place in ("usr/lib", "lib")),
            "HOME": os.environ.get("HOME", "/root"),
        }


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lego-rl-tests" / "kubernetes"


def programs(cache: Path) -> Programs:
    """Build or unpack what is missing. Raises SystemExit that says what this machine lacks."""
    found = Programs(cache / "bin-2", cache / "tools")
    if all((found.bin / name).is_file() for name in BUILT):
        return found
    missing = [name for name in ("apt-get", "dpkg-source", "make", "gcc", "patch") if shutil.which(name) is None]
    if missing or not Path("/etc/debian_version").is_file():
        lacking = ", ".join(missing) or "its package sources"
        sys.exit(f"building the cluster needs Debian 12 and {lacking}: apt-get install dpkg-dev build-essential")
    env = apt(cache)
    print(f"building Kubernetes in {cache}: about nine CPU minutes, once", flush=True)
    _unpack(cache, env, found.tools)
    _compile(cache, env, found)
    shutil.rmtree(cache / "bin", ignore_errors=True)  # of a version before
    return found


def apt(cache: Path) -> dict[str, str]:
    """An apt of our own: this machine's package sources with source packages too, and no right to install."""
    state = cache / "apt"
    for name in ("lists/partial", "archives/partial", "sources.list.d"):
        (state / name).mkdir(parents=True, exist_ok=True)
    for path in Path("/etc/apt/sources.list.d").glob("*.sources"):
        text = re.sub(r"(?m)^Types:.*$", "Types: deb deb-src", path.read_text())
        (state / "sources.list.d" / path.name).write_text(text)
    lines = Path("/etc/apt/sources.list").read_text().splitlines() if Path("/etc/apt/sources.list").is_file() else []
    both = [line for found in lines if found.startswith("deb ") for line in (found, found.replace("deb ", "deb-src ", 1))]
    (state / "sources.list").write_text("\n".join(both) + "\n")
    (state / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{state}/sources.list";\nDir::Etc::SourceParts "{state}/sources.list.d";\n'
        f'Dir::State::Lists "{state}/lists";\nDir::Cache "{state}";\nAPT::Sandbox::User "{os.environ.get("USER") or "root"}";\n'
    )
    env = os.environ | {"APT_CONFIG": str(state / "apt.conf")}
    run(["apt-get", "update", "-qq"], cache, env)
    return env


def _unpack(cache: Path, env: dict[str, str], tools: Path) -> None:
    packages = cache / "debs"
    packages.mkdir(exist_ok=True)
    tools.mkdir(exist_ok=True)
    run(["apt-get", "download", "-qq", *_GO, *_RUN], packages, env)
    for package in sorted(packages.glob("*.deb")):
        run(["dpkg", "-x", str(package), str(tools)], packages, env)
    shutil.rmtree(packages)


def _compile(cache: Path, env: dict[str, str], found: Programs) -> None:
    source = cache / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    run(["apt-get", "source", "-qq", "kubernetes"], source, env)
    tree = next(path for path in source.glob("kubernetes-*") if path.is_dir())
    run(["apt-get", "download", "-qq", _REFLECT], source, env)
    run(["dpkg", "-x", str(next(source.glob(f"{_REFLECT}_*.deb"))), str(source / "newer")], source, env)
    vendored = tree / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(source / "newer/usr/share/gocode/src/github.com/modern-go/reflect2", vendored)
    (tree / ".go/src/k8s.io").mkdir(parents=True)
    (tree / ".go/src/k8s.io/kubernetes").symlink_to("../../..")
    go = found.tools / "usr/lib/go-1.19"
    building = os.environ | found.env | _VERSION
    building |= {"GOROOT": str(go), "GOPATH": str(tree / ".go"), "GOCACHE": str(source / "cache"), "HOME": str(source), "GOPROXY": "off"}
    building |= {"CGO_ENABLED": "0", "GOMAXPROCS": "1", "GOFLAGS": "-p=1", "PATH": f"{go}/bin:{building['PATH']}"}
    run(["nice", "-n", "10", "make", "WHAT=" + " ".join(f"cmd/{name}" for name in BUILT)], tree / ".go/src/k8s.io/kubernetes", building)
    unfinished = cache / "bin-2.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for name in BUILT:
        shutil.copy(tree / "_output/local/bin/linux/amd64" / name, unfinished / name)
    shutil.rmtree(found.bin, ignore_errors=True)
    unfinished.rename(found.bin)
    shutil.rmtree(source)


def run(argv: list[str], directory: Path, env: dict[str, str]) -> None:
    """Raises SystemExit with the end of what the program said."""
    log = directory / "build.log"
    with log.open("ab") as output:
        if subprocess.run(argv, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode != 0:
            sys.exit(f"{argv[0]} failed: see {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-10:]))


if __name__ == "__main__":
    print(programs(default_cache()).bin)
