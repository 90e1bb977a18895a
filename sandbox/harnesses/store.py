"""The store of pinned harness runtimes: installed once, then only read.

```
<root>/<name>/<version>-<pin digest>/       the tree, read-only
<root>/<name>/<version>-<pin digest>.json   its manifest: every file with size and SHA-256
```

A tree appears whole (built beside its place, then renamed) and is never changed. Nothing is fetched when a trial runs.

RuntimeStoreError
 ├─ RuntimeMissing    not installed
 └─ RuntimeTampered   installed, but the bytes are not the ones that were installed
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from server.schemas.rundir import write_atomic

from .pins import NpmPin, Pin, PythonPin

INSTALL_TIMEOUT_S = 900


class RuntimeStoreError(Exception):
    """Something about the store that a person has to put right; the message says how."""


class RuntimeMissing(RuntimeStoreError):
    """The runtime is not installed."""


class RuntimeTampered(RuntimeStoreError):
    """Files differ from those that were installed."""


class FileEntry(BaseModel):
    """`link` is a symbolic link's target; then size and digest are empty."""

    model_config = ConfigDict(extra="forbid")

    size: int = 0
    sha256: str = ""
    link: str = ""


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    version: str
    pin: str
    files: dict[str, FileEntry]


class Store:
    """Runtimes under `root`. Construction does not touch the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tree(self, pin: Pin) -> Path:
        return self.root / pin.name / f"{pin.version}-{pin.digest[:16]}"

    def manifest_path(self, pin: Pin) -> Path:
        return self.tree(pin).with_name(self.tree(pin).name + ".json")

    def require(self, pin: Pin) -> Path:
        """The installed tree; raises RuntimeMissing. Does not read the files: `verify` does."""
        if not self.manifest_path(pin).is_file() or not self.tree(pin).is_dir():
            raise RuntimeMissing(
                f"{pin.name} {pin.version} is not installed in {self.root}; run `python -m sandbox.cli harness install {pin.name}`"
            )
        return self.tree(pin)

    def verify(self, pin: Pin) -> Path:
        """The installed tree after every byte was compared with the manifest, and Python files with their wheels' own RECORDs.

        Raises RuntimeMissing or RuntimeTampered.
        """
        tree = self.require(pin)
        manifest = Manifest.model_validate_json(self.manifest_path(pin).read_bytes())
        found = _entries(tree)
        wrong = sorted(path for path in manifest.files.keys() | found.keys() if manifest.files.get(path) != found.get(path))
        if manifest.pin != pin.digest:
            wrong.append("the manifest's pin")
        if isinstance(pin, PythonPin):
            wrong += _unlike_record(tree, found)
        if wrong:
            raise RuntimeTampered(
                f"{pin.name} {pin.version} in {tree} differs from what was installed ({len(wrong)} files, first: {wrong[0]}); "
                f"run `python -m sandbox.cli harness install {pin.name} --again`"
            )
        return tree

    def install(self, pin: Pin, *, again: bool = False, arguments: Sequence[str] = ()) -> Path:
        """Fetch, check and place the runtime; a no-op when it is there, unless `again`.

        `arguments` go to the package client (`uv pip install` or `npm pack`), for instance to name another index.
        Raises RuntimeStoreError with the client's last words when that fails.
        """
        if not again and self.manifest_path(pin).is_file() and self.tree(pin).is_dir():
            return self.tree(pin)
        parent = self.tree(pin).parent
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".installing-", dir=parent))
        try:
            built = scratch / "tree"
            if isinstance(pin, PythonPin):
                _install_python(pin, built, arguments)
            else:
                _install_npm(pin, built, scratch, arguments)
            files = _entries(built)
            if isinstance(pin, PythonPin) and (wrong := _unlike_record(built, files)):
                raise RuntimeStoreError(f"{pin.name}: {wrong[0]} is not the file that its wheel lists")
            _protect(built)
            self._remove(pin)
            built.chmod(0o755)  # moving a directory to another parent writes its `..`
            built.replace(self.tree(pin))
            self.tree(pin).chmod(0o555)
            manifest = Manifest(name=pin.name, version=pin.version, pin=pin.digest, files=files)
            write_atomic(self.manifest_path(pin), manifest.model_dump_json(exclude_defaults=True), mode=0o444)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return self.tree(pin)

    def _remove(self, pin: Pin) -> None:
        self.manifest_path(pin).unlink(missing_ok=True)
        if self.tree(pin).is_dir():
            for folder, _, _ in os.walk(self.tree(pin)):
                Path(folder).chmod(0o755)
            shutil.rmtree(self.tree(pin))


def _install_python(pin: PythonPin, tree: Path, arguments: Sequence[str]) -> None:
    uv = Path(sys.executable).with_name("uv")
    command = [
        str(uv) if uv.exists() else "uv",
        "pip",
        "install",
        "--quiet",
        "--no-config",
        "--python",
        sys.executable,
        "--target",
        str(tree),
    ]
    # Copies, not hard links into uv's cache: making the tree read-only must not touch the cache.
    command += ["--require-hashes", "--no-deps", "--compile-bytecode", "--link-mode", "copy", *arguments, "-r", str(pin.lock)]
    _run(command, pin)


def _install_npm(pin: NpmPin, tree: Path, scratch: Path, arguments: Sequence[str]) -> None:
    if shutil.which("npm") is None:
        raise RuntimeStoreError(f"{pin.name} comes from the npm registry and `npm` was not found; install Node.js with npm")
    _run(["npm", "pack", "--silent", "--pack-destination", str(scratch), *arguments, f"{pin.package}@{pin.version}"], pin)
    (archive,) = scratch.glob("*.tgz")
    with archive.open("rb") as file:
        integrity = "sha512-" + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if integrity != pin.integrity:
        raise RuntimeStoreError(f"{pin.package}@{pin.version} has integrity {integrity}, expected {pin.integrity}; nothing was installed")
    tree.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.startswith("package/"):
                member.name = member.name.removeprefix("package/")
                tar.extract(member, tree, filter="data")


def _run(command: list[str], pin: Pin) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT_S)
    except FileNotFoundError as error:
        raise RuntimeStoreError(f"{pin.name} cannot be installed: `{command[0]}` was not found") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeStoreError(f"installing {pin.name} took more than {INSTALL_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeStoreError(
            f"{pin.name} {pin.version} could not be fetched: {(error.stderr or error.stdout).strip()[-400:]}"
        ) from error


def _entries(tree: Path) -> dict[str, FileEntry]:
    entries = {}
    for folder, folders, names in os.walk(tree):
        for name in [*names, *(f for f in folders if Path(folder, f).is_symlink())]:
            path = Path(folder, name)
            relative = str(path.relative_to(tree))
            if path.is_symlink():
                entries[relative] = FileEntry(link=str(path.readlink()))
            else:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                entries[relative] = FileEntry(size=path.stat().st_size, sha256=digest)
    return entries


def _unlike_record(tree: Path, entries: dict[str, FileEntry]) -> list[str]:
    """Files whose digest is not the one in their wheel's RECORD: the proof that the packages are as their authors published them."""
    wrong = []
    for record in tree.glob("*.dist-info/RECORD"):
        for path, digest, _ in csv.reader(record.read_text().splitlines()):
            if not digest.startswith("sha256=") or path.startswith(".."):
                continue
            expected = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "==").hex()
            if path not in entries or entries[path].sha256 != expected:
                wrong.append(path)
    return wrong


def _protect(tree: Path) -> None:
    for folder, _, names in os.walk(tree):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o555 if path.stat().st_mode & 0o100 else 0o444)
        Path(folder).chmod(0o555)
