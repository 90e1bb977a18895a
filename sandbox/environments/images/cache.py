"""The image cache of a user: every layer unpacked once, every image a record of its layers, the least recently used removed first.

```
<root>/layers/<name>/          one layer, read-only; the name stands for the digest of its uncompressed tar
<root>/images/<digest>.json    a record; its time of change is when the image was last used
<root>/names/<key>.json        what a reference stands for
<root>/locks/                  flock only, kept: `cache` shared while images are added, exclusive to remove; `<digest>` shared by its users
<root>/python/<key>/           this machine's Python, which needs nothing of an image that it runs in: it grades there
<root>/scans/<digest>/         what was found in an image about a task (see leaks)
<root>/staging/                what is not finished
<root>/build/                  what buildah keeps between builds: base images and steps
<root>/blobs/                  layers as registries send them, kept until the next removal: images share them
```

A layer and a record appear whole, by rename, after their digests were checked. All methods block: call them in a thread.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from sandbox.environments.errors import ImageError
from sandbox.harnesses.selfcontained import NotSelfContained, own_python, python_of
from sandbox.harnesses.warm import interpreter
from server.schemas.datadir import DataDir, default_data_dir
from server.schemas.rundir import write_atomic
from server.schemas.runspec import Sandbox as Settings

from .layout import Layer, Manifest, opened, read
from .leaks import Leak, scan, secrets_of
from .unpack import unpack

MAX_LAYER_BYTES = 32 << 30
IN_PLACE = "dir:"
"""`dir:/path` names a root file system that is used where it lies."""


class Rootfs(NamedTuple):
    """What the root directory of a sandbox is stacked from, the topmost first. Read-only, and seen in place of the host's programs."""

    layers: tuple[Path, ...]
    env: Mapping[str, str] = MappingProxyType({})


class CachedLayer(NamedTuple):
    name: str
    bytes: int


class Image(BaseModel):
    """What is known of an image. `layers`: the lowest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    layers: tuple[CachedLayer, ...]
    env: dict[str, str] = {}
    workdir: str = "/"

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)


class _Name(BaseModel):
    reference: str
    digest: str


class ImageCache:
    """Construction does not touch the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs"

    # ---------------------------------------------------------------- look up

    def find(self, image: str) -> Image | None:
        """The image that a reference or a digest stands for, where it is here with all its layers."""
        digest = image
        if not image.startswith("sha256:"):
            path = self._name_path(image)
            if not path.is_file():
                return None
            digest = _Name.model_validate_json(path.read_bytes()).digest
        record = self._record(digest)
        if not record.is_file():
            return None
        found = Image.model_validate_json(record.read_bytes())
        return found if all(self._layer(layer.name).is_dir() for layer in found.layers) else None

    def require(self, image: str) -> Image:
        """`find`, noted as a use. Raises ImageError where the image is not here."""
        found = self.find(image)
        if found is None:
            raise ImageError(f"the image {image} is not in {self.root}: fetch it with `rl image pull {image}`")
        with contextlib.suppress(FileNotFoundError):  # removed a moment ago: whoever takes a layer of it will see
            os.utime(self._record(found.digest))
        return found

    def rootfs(self, image: str) -> Rootfs:
        """What a sandbox of this image is made from; `dir:/path` is taken where it lies. Raises ImageError."""
        if image.startswith(IN_PLACE):
            path = Path(image.removeprefix(IN_PLACE))
            if not path.is_absolute() or not path.is_dir() or path.resolve() == Path("/"):
                raise ImageError(f"the image {image} is no directory with a root file system: give an absolute path, not /")
            return Rootfs((path.resolve(),))
        found = self.require(image)
        return Rootfs(tuple(self._layer(layer.name) for layer in reversed(found.layers)), found.env)

    def images(self) -> list[tuple[Image, list[str], float]]:
        """Every image with its names and the time of its last use, the latest first."""
        names: dict[str, list[str]] = {}
        for path in sorted((self.root / "names").glob("*.json")):
            name = _Name.model_validate_json(path.read_bytes())
            names.setdefault(name.digest, []).append(name.reference)
        records = sorted((self.root / "images").glob("*.json"), key=lambda path: -path.stat().st_mtime)
        found = [(Image.model_validate_json(path.read_bytes()), path.stat().st_mtime) for path in records]
        return [(image, names.get(image.digest, []), used) for image, used in found]

    @contextlib.contextmanager
    def held(self, image: Image) -> Iterator[None]:
        """As long as this lasts, in whatever process, the image is not removed."""
        with self._lock(_hex(image.digest), fcntl.LOCK_SH):
            yield

    def leaks(self, image: Image, task: Path) -> list[Leak]:
        """What the image gives away of a task. Reads every file of the image the first time."""
        secrets = secrets_of(task)
        kept = self.root / "scans" / _hex(image.digest) / f"{secrets.digest}.json"
        if not kept.is_file():
            found = scan([self._layer(layer.name) for layer in image.layers], secrets)
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, json.dumps(found))
        return [Leak(*row) for row in json.loads(kept.read_bytes())]

    # ---------------------------------------------------------------- add

    def add_layout(self, layout: Path, reference: str, name: str = "") -> Image:
        """Unpack the layers of an OCI layout's image `name` that are not here yet, and call the image `reference`. Raises ImageError."""
        with self.adding():
            manifest = read(layout, name)
            layers = tuple(self._add(layer) for layer in manifest.layers)
            return self._record_image(manifest, layers, reference)

    def add_tar(self, archive: Path, reference: str) -> Image:
        """A root file system in one uncompressed tar, as `debootstrap` and `docker export` make them. Raises ImageError."""
        if not archive.is_file():
            raise ImageError(f"{archive} is no file")
        with archive.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        layer = Layer(archive, digest, digest, archive.stat().st_size, compressed=False)
        with self.adding():
            layers = (self._add(layer),)
            return self._record_image(Manifest(digest, (layer,), {}, "/"), layers, reference)

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """As long as this lasts nothing is removed that no image has yet."""
        with self._lock("cache", fcntl.LOCK_SH):
            yield

    def _add(self, layer: Layer) -> CachedLayer:
        """One process unpacks a layer; the others wait for it."""
        name = _short(layer.diff_id)
        target = self._layer(name)
        size = target.with_suffix(".size")
        with self._lock(name, fcntl.LOCK_EX):
            if not target.is_dir():
                with self.staging() as place:
                    unpacked = place / "layer"
                    unpacked.mkdir(mode=0o755)
                    with opened(layer) as stream:
                        written = unpack(stream, unpacked, MAX_LAYER_BYTES)
                    target.parent.mkdir(exist_ok=True)
                    write_atomic(size, str(written))
                    unpacked.rename(target)
        return CachedLayer(name, int(size.read_text()))

    def _record_image(self, manifest: Manifest, layers: tuple[CachedLayer, ...], reference: str) -> Image:
        image = Image(digest=manifest.digest, layers=layers, env=manifest.env, workdir=manifest.workdir)
        for path, text in (
            (self._record(image.digest), image.model_dump_json()),
            (self._name_path(reference), _Name(reference=reference, digest=image.digest).model_dump_json()),
        ):
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, text)
        return image

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A directory of the caller's own on the cache's file system, removed at the end."""
        place = self.root / "staging" / secrets.token_hex(8)
        place.mkdir(parents=True)
        try:
            yield place
        finally:
            shutil.rmtree(place)

    def python(self) -> Path:
        """What a sandbox that grades has in place of `sys.base_prefix`: the same Python with all of its libraries. Raises ImageError."""
        key = hashlib.sha256(f"{sys.base_prefix}\0{sys.version}".encode()).hexdigest()[:16]
        target = self.root / "python" / key
        with self._lock(f"python-{key}", fcntl.LOCK_EX), self.adding():
            if not target.is_dir():
                with self.staging() as place:
                    try:
                        own_python(place)
                    except NotSelfContained as error:
                        raise ImageError(f"images cannot be graded with the Python of this machine: {error}") from error
                    home = Path(python_of(place)).parents[1]
                    program = Path(interpreter()).relative_to(sys.base_prefix)
                    if not (home / program).exists():
                        (home / program).symlink_to("python3")
                    target.parent.mkdir(exist_ok=True)
                    home.rename(target)
        return target

    # ---------------------------------------------------------------- remove

    def used_bytes(self) -> int:
        """Of all layers. Reads the records only."""
        return sum(int(path.read_text()) for path in (self.root / "layers").glob("*.size"))

    def prune(self, keep_bytes: int, builds: bool = False) -> list[str]:
        """Remove the images used longest ago until the layers of the rest have at most `keep_bytes`; returns the digests that went.

        An image that is held stays. What was never finished and layers that no image has go too, and with `builds` what builds share.
        Waits until no image is being added.
        """
        removed = []
        with self._lock("cache", fcntl.LOCK_EX):
            images = [image for image, _, _ in self.images()]
            kept = {layer for image in images for layer in image.layers}
            for image in reversed(images):
                if sum(layer.bytes for layer in kept) <= keep_bytes:
                    break
                if self._forget(image):
                    removed.append(image.digest)
                    images = [other for other in images if other.digest != image.digest]
                    kept = {layer for other in images for layer in other.layers}
            names = {layer.name for layer in kept}
            with self.staging() as place:
                for path in (self.root / "layers").glob("*"):
                    if path.stem not in names:
                        path.rename(place / path.name)
            for path in (*self._unfinished, *([self.root / "build"] if builds else [])):
                shutil.rmtree(path, ignore_errors=True)
        return removed

    def tidy(self) -> None:
        """Remove what was fetched and is unpacked, unless an image is being added."""
        with contextlib.suppress(BlockingIOError), self._lock("cache", fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in self._unfinished:
                shutil.rmtree(path, ignore_errors=True)

    def left_bytes(self) -> int:
        """Of what fetching left when it was interrupted; 0 while an image is being added. Changes nothing."""
        if not self.root.is_dir():
            return 0
        try:
            with self._lock("cache", fcntl.LOCK_EX | fcntl.LOCK_NB):
                return sum(path.lstat().st_size for top in self._unfinished for path in top.rglob("*"))
        except BlockingIOError:
            return 0

    def _forget(self, image: Image) -> bool:
        try:
            with self._lock(_hex(image.digest), fcntl.LOCK_EX | fcntl.LOCK_NB):
                for path in (self.root / "names").glob("*.json"):
                    if _Name.model_validate_json(path.read_bytes()).digest == image.digest:
                        path.unlink()
                shutil.rmtree(self.root / "scans" / _hex(image.digest), ignore_errors=True)
                self._record(image.digest).unlink()
        except BlockingIOError:
            return False
        return True

    # ---------------------------------------------------------------- places

    @property
    def _unfinished(self) -> tuple[Path, Path]:
        return self.blobs, self.root / "staging"

    def _layer(self, name: str) -> Path:
        return self.root / "layers" / name

    def _record(self, digest: str) -> Path:
        return self.root / "images" / f"{_hex(digest)}.json"

    def _name_path(self, reference: str) -> Path:
        return self.root / "names" / f"{hashlib.sha256(reference.encode()).hexdigest()}.json"

    @contextlib.contextmanager
    def _lock(self, name: str, how: int) -> Iterator[None]:
        """Agents and other users see nothing of the cache: some images hold set-up that is not theirs to read."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / "locks").mkdir(exist_ok=True)
        fd = os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


def cache_of(settings: Settings) -> ImageCache:
    """The cache that a run uses: the user's own unless `sandbox.images.cache` names another."""
    return ImageCache(settings.images.cache or DataDir(default_data_dir()).images)


def _hex(digest: str) -> str:
    value = digest.removeprefix("sha256:")
    if len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ImageError(f"{digest[:80]!r} is no SHA-256 digest")
    return value


def _short(digest: str) -> str:
    """130 bits of a digest: 127 of these names fit into the one page that mount(2) takes."""
    return base64.b32encode(bytes.fromhex(_hex(digest))).decode()[:26].lower()
