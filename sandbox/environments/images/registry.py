"""Images from a registry, or from another store of this machine, with skopeo: it knows logins, mirrors, retries and signatures.

Its files are the usual ones: `containers-auth.json` and `registries.conf`. A registry on this machine may speak plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
from pathlib import Path

from sandbox.environments.errors import ImageError

from .cache import Image, ImageCache
from .layout import read
from .programs import find, run

PULL_S = 1800
_REFERENCE = re.compile(r"([A-Za-z0-9][\w.-]*(:\d+)?/)?[a-z0-9][\w./-]*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
_TRANSPORTS = ("docker-archive:", "oci-archive:", "docker-daemon:", "containers-storage:", "oci:")
_POLICIES = ("/etc/containers/policy.json", "~/.config/containers/policy.json")


async def pull(cache: ImageCache, source: str, name: str = "") -> Image:
    """Fetch `source`, a reference or `TRANSPORT:…` as skopeo knows it, for linux/amd64, and call it `name` (default: the source).

    Raises ImageError. Layers that are here already are neither fetched again in this pass nor unpacked again.
    """
    if not source.startswith(_TRANSPORTS) and not is_reference(source):
        raise ImageError(f"{source[:200]!r} is no image reference")
    skopeo = find("skopeo", "fetching an image from a registry")
    local = source.startswith(_TRANSPORTS)
    with cache.adding(), cache.staging() as place:
        layout = place / "layout"
        await asyncio.to_thread(_lend, cache.blobs, layout)
        options = ["--override-os", "linux", "--override-arch", "amd64"]
        options += [] if local or not on_this_machine(source) else ["--src-tls-verify=false"]
        trust = [] if any(os.path.exists(os.path.expanduser(path)) for path in _POLICIES) else ["--insecure-policy"]  # noqa: ASYNC240, PTH110, PTH111
        origin = source if local else f"docker://{source}"
        status, words = await run([skopeo, *trust, "copy", "--retry-times", "3", *options, origin, f"oci:{layout}:image"], PULL_S)
        if status != 0:
            raise ImageError(f"cannot fetch the image {source}: {_reason(words)}")
        await asyncio.to_thread(_keep, layout, cache.blobs)
        return await asyncio.to_thread(cache.add_layout, layout, name or source, "image")


def _lend(blobs: Path, layout: Path) -> None:
    """Give a layout that is about to be written the layers that were fetched before: skopeo asks for none that is there."""
    target = layout / "blobs" / "sha256"
    target.mkdir(parents=True)
    for blob in blobs.glob("*"):
        os.link(blob, target / blob.name)


def _keep(layout: Path, blobs: Path) -> None:
    """Only layers: skopeo writes a manifest in place, where another process may be reading it."""
    blobs.mkdir(exist_ok=True)
    for layer in read(layout, "image").layers:
        with contextlib.suppress(FileExistsError):
            os.link(layer.blob, blobs / layer.blob.name)


def is_reference(text: str) -> bool:
    """Whether this names an image of a registry: nothing of this machine, and no option of a program."""
    return bool(_REFERENCE.fullmatch(text))


def on_this_machine(reference: str) -> bool:
    """Whether a reference names a registry at a loopback address, which may speak plain HTTP."""
    host = reference.partition("/")[0].partition(":")[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(words: str) -> str:
    """skopeo logs `level=fatal msg="…"`; the message is what counts."""
    last = words.splitlines()[-1] if words else "no answer"
    found = re.search(r'msg="(.*)"$', last)
    return (found[1].replace('\\"', '"') if found else last)[-500:]
