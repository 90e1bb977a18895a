"""The store of pinned harness runtimes: installed once, then only read.

```
<root>/<name>/<version>-<pin digest>/       the tree, read-only
<root>/<name>/<version>-<pin digest>.json   its manifest: every file with size and SHA-256
```

A tree appears whole (built beside its place, then renamed) and is never changed. Nothing is fetched when a trial runs. Of several who
install one harness at the same time the first does it and the others wait; what a killed one left is removed by the next. Who uses a tree
holds a shared lock (flock) on its manifest; who would remove or replace it needs that lock alone.

RuntimeStoreError
 ├─ RuntimeMissing    not installed
 └─ RuntimeTampered   installed, but the bytes are not the ones that were installed
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from server.schemas.rundir import write_atomic

from .fetch import FetchError, fetch
from .pins import Pin, PythonPin
from .selfcontained import NotSelfContained

_UNFINISHED = ".installing-"
MACHINE = "x86_64"
"""The pins are for this one, and so is the system-call filter of a sandbox."""


class RuntimeStoreError(Exception):
    """Something about the store that a person has to put right; the message says how."""


class RuntimeMissing(RuntimeStoreError):
    """The runtime is not installed."""


class RuntimeTampered(RuntimeStoreError):
    """Files differ from those that were installed."""


class FileEntry(NamedTuple):
    """`link` is a symbolic link's target; then the rest is empty. A pipe, a socket or a device, which no runtime has, has size -1."""

    size: int = 0
    mtime_ns: int = 0
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
        self.root = root.absolute()  # a runtime is mounted at its path

    def tree(self, pin: Pin) -> Path:
        return self.root / pin.name / f"{pin.version}-{pin.digest[:16]}"

    def manifest_path(self, pin: Pin) -> Path:
        return self.tree(pin).with_name(self.tree(pin).name + ".json")

    def require(self, pin: Pin) -> Path:
        """The installed tree; raises RuntimeMissing. Does not read the files: `verify` does."""
        if not self.manifest_path(pin).is_file() or not self.tree(pin).is_dir():
            raise RuntimeMissing(f"{pin.name} {pin.version} is not installed in {self.root}; run `rl harness install {pin.name}`")
        return self.tree(pin)

    def hold(self, pin: Pin) -> None:
        """As long as this object lives nobody removes or replaces what is installed now. Raises RuntimeMissing."""
        try:
            descriptor = lock(self.manifest_path(pin), fcntl.LOCK_SH)
        except (FileNotFoundError, BlockingIOError):  # the latter: it is being removed
            self.require(pin)
            raise RuntimeMissing(f"{pin.name} {pin.version} is being replaced in {self.root}: try again") from None
        weakref.finalize(self, os.close, descriptor)

    def verify(self, pin: Pin, *, deep: bool = True) -> Path:
        """The installed tree after every byte was compared with the manifest, and Python files with their wheels' own RECORDs.

        Without `deep` names, sizes and times are compared, which notices every accident in a tenth of the time; it is what a runner does
        when it starts. Raises RuntimeMissing or RuntimeTampered, or RuntimeStoreError where it cannot be read.
        """
        _for_this_machine(pin)
        tree, again = self.require(pin), f"run `rl harness install {pin.name} --again`"
        try:
            manifest = Manifest.model_validate_json(self.manifest_path(pin).read_bytes())
            found, expected = _entries(tree, deep), manifest.files
        except ValidationError as error:
            raise RuntimeTampered(f"{self.manifest_path(pin)} is no manifest any more; {again}") from error
        except OSError as error:
            raise RuntimeStoreError(f"{pin.name} {pin.version} cannot be read: {error}") from error
        if not deep:
            expected = {path: entry._replace(sha256="") for path, entry in expected.items()}
        wrong = sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
        if manifest.pin != pin.digest:
            wrong.append("the manifest's pin")
        if deep and not wrong and isinstance(pin, PythonPin):
            wrong = _unlike_record(tree, found)
        if wrong:
            raise RuntimeTampered(
                f"{pin.name} {pin.version} in {tree} differs from what was installed ({len(wrong)} files, first: {wrong[0]}); {again}"
            )
        return tree

    def install(self, pin: Pin, *, again: bool = False, arguments: Sequence[str] = ()) -> Path:
        """Fetch, check and place the runtime; a no-op when it is there, unless `again`.

        `arguments` go to the package client (`uv pip install`, `npm pack` or `apt-get`), for instance to name another index.
        Raises RuntimeStoreError with the client's last words when that fails, and when the disk does not take it.
        """
        if not again and self._has(pin):
            return self.tree(pin)
        _for_this_machine(pin)
        try:
            with self._alone(pin) as scratch:
                if again or not self._has(pin):
                    self._install(pin, scratch, arguments)
        except (FetchError, NotSelfContained) as error:
            raise RuntimeStoreError(str(error)) from error
        except OSError as error:
            raise RuntimeStoreError(f"{pin.name} {pin.version} cannot be placed in {self.root}: {error}") from error
        return self.tree(pin)

    def _has(self, pin: Pin) -> bool:
        return self.manifest_path(pin).is_file() and self.tree(pin).is_dir()

    @contextlib.contextmanager
    def _alone(self, pin: Pin) -> Iterator[Path]:
        """A directory to build in, while nobody else installs this harness. The lock goes with the process that holds it."""
        parent = self.tree(pin).parent
        parent.mkdir(parents=True, exist_ok=True)
        with (self.root / f".{pin.name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for abandoned in parent.glob(f"{_UNFINISHED}*"):
                discard(abandoned)
            scratch = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
            try:
                yield scratch
            finally:
                discard(scratch)

    def _install(self, pin: Pin, scratch: Path, arguments: Sequence[str]) -> None:
        built = scratch / "tree"
        fetch(pin, built, scratch, arguments)
        files = _entries(built, deep=True)
        if isinstance(pin, PythonPin) and (wrong := _unlike_record(built, files)):
            raise RuntimeStoreError(f"{pin.name}: {wrong[0]} is not the file that its wheel lists")
        _protect(built)
        with contextlib.suppress(FileNotFoundError):
            try:
                os.close(lock(self.manifest_path(pin), fcntl.LOCK_EX))
            except BlockingIOError:
                raise RuntimeStoreError(f"a live run uses {pin.name} {pin.version}, which cannot be replaced: end the run first") from None
        self.manifest_path(pin).unlink(missing_ok=True)
        discard(self.tree(pin))
        built.chmod(0o755)  # moving a directory to another parent writes its `..`
        built.replace(self.tree(pin))
        self.tree(pin).chmod(0o555)
        manifest = Manifest(name=pin.name, version=pin.version, pin=pin.digest, files=files)
        write_atomic(self.manifest_path(pin), manifest.model_dump_json(), mode=0o444)


def lock(manifest: Path, kind: int) -> int:
    """The descriptor that holds the lock. Raises BlockingIOError when another holds it, FileNotFoundError."""
    descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _for_this_machine(pin: Pin) -> None:
    if platform.machine() != MACHINE:
        raise RuntimeStoreError(f"{pin.name} is pinned for {MACHINE} Linux, and this is {platform.machine()}: use a machine of that kind")


def discard(tree: Path) -> None:
    """Remove a directory whose own are read-only."""
    for folder, _, _ in os.walk(tree):
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o755)
    shutil.rmtree(tree, ignore_errors=True)


def _entries(tree: Path, deep: bool) -> dict[str, FileEntry]:
    """All files and links; digests only when `deep`. Plain strings: there are tens of thousands of files."""
    entries: dict[str, FileEntry] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{tree}/{folder}") as listing:
            for item in listing:
                path = f"{folder}{item.name}"
                if item.is_symlink():
                    entries[path] = FileEntry(link=os.readlink(item.path))  # noqa: PTH115
                elif item.is_dir():
                    folders.append(f"{path}/")
                elif not item.is_file():
                    entries[path] = FileEntry(size=-1)
                else:
                    status = item.stat(follow_symlinks=False)
                    entries[path] = FileEntry(status.st_size, status.st_mtime_ns, _sha256(item.path) if deep else "")
    return entries


def _sha256(path: str) -> str:
    with open(path, "rb") as file:  # noqa: PTH123
        return hashlib.file_digest(file, "sha256").hexdigest()


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
