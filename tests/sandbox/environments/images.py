"""Small images made from this machine's own programs: nothing is fetched."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

Member = tuple[tarfile.TarInfo, bytes]

PROGRAMS = ("dash", "bash", "ls", "cat", "touch", "id", "rm", "mkdir", "sed", "chmod", "sleep", "timeout")


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, uid: int = 0) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.uid, info.gid, info.size = kind, link, mode, uid, uid, len(data)
    return info, data


def directory(name: str, mode: int = 0o755) -> Member:
    return member(name, kind=tarfile.DIRTYPE, mode=mode)


def tar(members: Iterable[Member]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return output.getvalue()


def programs() -> list[Member]:
    """A shell, some of coreutils and the libraries that they need: a root file system without Python."""
    found = {f"bin/{name}": Path(shutil.which(name) or f"/bin/{name}") for name in PROGRAMS}
    listing = subprocess.run(["ldd", *map(str, found.values())], capture_output=True, text=True, check=True).stdout
    found |= {name.removeprefix("/"): Path(name) for name in re.findall(r"(/\S+) \(0x", listing)}
    files = [member(name, path.read_bytes(), mode=0o755) for name, path in found.items()]
    return [member("bin/sh", kind=tarfile.SYMTYPE, link="dash"), *files]


def layout(target: Path, layers: list[bytes], env: dict[str, str] | None = None, name: str = "", command: tuple[str, ...] = ()) -> str:
    """Write an OCI image layout of these tars; returns the manifest's digest."""
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [f"{key}={value}" for key, value in (env or {}).items()], "WorkingDir": "/work", "Cmd": [*command]},
        "history": [{"created_by": "test"} for _ in layers],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [blob(gzip.compress(layer, 1), "application/vnd.oci.image.layer.v1.tar+gzip") for layer in layers],
    }
    entry = blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": name} if name else {}
    (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(entry["digest"])
