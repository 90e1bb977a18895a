"""An OCI image layout on disk (image-spec "image-layout"): index, manifest, configuration, layers. Every byte is checked by its digest.

What a layout says about itself is believed only as far as a digest reaches: from the manifest's own downwards.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sandbox.environments.errors import ImageError

_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_JSON_BYTES = 8 << 20
_NAME = "org.opencontainers.image.ref.name"
MAX_LAYERS = 127


@dataclass(frozen=True)
class Layer:
    blob: Path
    digest: str
    """Of the blob as it is stored, `sha256:…`."""
    diff_id: str
    """Of the uncompressed tar, `sha256:…`: what two images share, however they are packed."""
    size: int
    compressed: bool


@dataclass(frozen=True)
class Manifest:
    digest: str
    layers: tuple[Layer, ...]
    """The lowest first."""
    env: dict[str, str]
    workdir: str


def read(layout: Path, name: str = "") -> Manifest:
    """The manifest for linux/amd64 that `name` (a reference or a digest) stands for; without a name the only one. Raises ImageError."""
    blobs = layout / "blobs"
    top = _load(layout / "index.json", layout)
    entries = [entry for entry in _list(top, "manifests", layout) if name in ("", _annotation(entry), entry.get("digest"))]
    if len(entries) != 1:
        names = ", ".join(sorted(filter(None, (_annotation(entry) for entry in _list(top, "manifests", layout))))) or "none has a name"
        raise ImageError(f"{layout} has {len(entries)} images for {name or 'no name'!r}: name one of them ({names})")
    return _manifest(blobs, entries[0], layout)


def _manifest(blobs: Path, entry: dict[str, Any], layout: Path) -> Manifest:
    digest = str(entry.get("digest"))
    document = _json(blobs, entry, layout)
    if entry.get("mediaType") in _INDEXES:
        fitting = [
            found
            for found in _list(document, "manifests", layout)
            if (found.get("platform") or {}).get("os") == "linux" and (found.get("platform") or {}).get("architecture") == "amd64"
        ]
        if not fitting:
            raise ImageError(f"{layout}: the image has no variant for linux/amd64")
        return _manifest(blobs, fitting[0] | {"mediaType": fitting[0].get("mediaType", _MANIFESTS[0])}, layout)
    if entry.get("mediaType") not in _MANIFESTS:
        raise ImageError(f"{layout}: a manifest of type {entry.get('mediaType')!r} cannot be read")
    config = _json(blobs, document.get("config") or {}, layout)
    diff_ids = (config.get("rootfs") or {}).get("diff_ids") or []
    descriptors = _list(document, "layers", layout)
    if len(diff_ids) != len(descriptors) or not 0 < len(descriptors) <= MAX_LAYERS:
        raise ImageError(f"{layout}: {len(descriptors)} layers, {len(diff_ids)} digests of their content; 1 to {MAX_LAYERS} can be used")
    layers = tuple(_layer(blobs, found, diff_id, layout) for found, diff_id in zip(descriptors, diff_ids, strict=True))
    settings = config.get("config") or {}
    env = dict(pair.split("=", 1) for pair in settings.get("Env") or [] if "=" in pair)
    return Manifest(digest, layers, env, settings.get("WorkingDir") or "/")


def _layer(blobs: Path, descriptor: dict[str, Any], diff_id: Any, layout: Path) -> Layer:
    kind = str(descriptor.get("mediaType"))
    if not kind.endswith((".tar", "+gzip", ".tar.gzip")):
        raise ImageError(f"{layout}: a layer of type {kind!r} cannot be unpacked; build or push the image with gzip layers")
    size = descriptor.get("size")
    if not isinstance(size, int) or size < 0:
        raise ImageError(f"{layout}: a layer has no size")
    digest = str(descriptor.get("digest"))
    return Layer(_blob(blobs, digest, layout), digest, checked_digest(diff_id, layout), size, not kind.endswith(".tar"))


@contextmanager
def opened(layer: Layer) -> Iterator[IO[bytes]]:
    """The uncompressed tar of a layer. Raises ImageError at the end unless both digests were right and everything was read."""
    with layer.blob.open("rb", buffering=0) as file:
        stored = _Hashed(file, layer.size)
        plain = _Hashed(gzip.GzipFile(fileobj=io.BufferedReader(stored)) if layer.compressed else stored)
        try:
            yield io.BufferedReader(plain, 1 << 18)
            while plain.read(1 << 18):
                pass  # what follows the archive's end counts too
            while stored.read(1 << 18):
                pass
        except (OSError, EOFError, zlib.error) as error:
            raise ImageError(f"layer {layer.digest} cannot be read: {error}") from error
    for what, found, wanted in (("layer", stored.digest, layer.digest), ("content of layer", plain.digest, layer.diff_id)):
        if found != wanted:
            raise ImageError(f"the {what} {wanted} has another digest, {found}: it was changed or damaged; pull the image again")


class _Hashed(io.RawIOBase):
    """Counts and hashes what is read through it."""

    def __init__(self, source: Any, limit: int | None = None) -> None:
        self._source = source
        self._left = limit
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._hash.update(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise ImageError("a layer is longer than its manifest says: it was changed; pull the image again")
        buffer[: len(data)] = data
        return len(data)


def checked_digest(digest: Any, layout: Path) -> str:
    """A well-formed `sha256:…`, which is safe as a part of a path. Raises ImageError."""
    text = str(digest)
    algorithm, _, value = text.partition(":")
    if algorithm != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ImageError(f"{layout}: {text[:80]!r} is no SHA-256 digest")
    return text


def _blob(blobs: Path, digest: str, layout: Path) -> Path:
    path = blobs / "sha256" / checked_digest(digest, layout).removeprefix("sha256:")
    if not path.is_file() or path.is_symlink():
        raise ImageError(f"{layout}: the blob {digest} is missing")
    return path


def _json(blobs: Path, descriptor: dict[str, Any], layout: Path) -> dict[str, Any]:
    digest = str(descriptor.get("digest"))
    path = _blob(blobs, digest, layout)
    if path.stat().st_size > _JSON_BYTES:
        raise ImageError(f"{layout}: the document {digest} is too large")
    data = path.read_bytes()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise ImageError(f"{layout}: the document {digest} was changed or damaged")
    return _object(data, layout)


def _load(path: Path, layout: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return _object(file.read(_JSON_BYTES), layout)
    except OSError as error:
        raise ImageError(f"{layout} is no OCI image layout: {os.strerror(error.errno or 0)}: {path.name}") from error


def _object(data: bytes, layout: Path) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ImageError(f"{layout}: a document is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ImageError(f"{layout}: a document is no JSON object")
    return value


def _list(document: dict[str, Any], key: str, layout: Path) -> list[dict[str, Any]]:
    value = document.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ImageError(f"{layout}: `{key}` is no list of descriptors")
    return value


def _annotation(entry: dict[str, Any]) -> str:
    return str((entry.get("annotations") or {}).get(_NAME, ""))
