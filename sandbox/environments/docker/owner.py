"""Who made what on an engine, so that what a dead owner left can be told from what a living one uses.

`{base}/docker-{token}/owner.json` is locked (flock) as long as its process lives and says how the engine is reached. Containers and images
carry the token as a label, and containers the second after which nobody can want them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sandbox.environments.errors import SandboxError
from server.schemas.runspec import Docker

from . import collect
from .container import EXPIRES, OWNER
from .engine import boundary, connect
from .images import remove_image

_PREFIX = "docker-"
_RECORD = "owner.json"


class Owned(NamedTuple):
    """What names an owner, its state directory, and the descriptor that holds the lock."""

    token: str
    state: Path
    record: int


def claim(base: Path, settings: Docker) -> Owned:
    """The state directory appears under its name only when it is locked."""
    base.mkdir(parents=True, exist_ok=True)
    token = os.urandom(6).hex()
    making = base.resolve() / f".{_PREFIX}{token}"
    making.mkdir(mode=0o700)
    record = os.open(making / _RECORD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(record, fcntl.LOCK_EX)
    os.write(record, settings.model_dump_json().encode())
    return Owned(token, making.rename(making.with_name(f"{_PREFIX}{token}")), record)


def abandoned(base: Path) -> Iterator[tuple[str, Path, Docker]]:
    """Owners below `base` that are gone; while the caller looks at one, nobody else sweeps it."""
    for state in sorted(base.glob(f"{_PREFIX}*")):
        try:
            record = os.open(state / _RECORD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield state.name.removeprefix(_PREFIX), state, Docker.model_validate_json(os.pread(record, 1 << 16, 0))
        except BlockingIOError:
            continue
        finally:
            os.close(record)


def sweep(base: Path) -> list[str]:
    """Remove what dead owners below `base` left on their engines. One whose engine cannot be reached stays for another time."""
    swept = []
    for token, state, settings in abandoned(base):
        with contextlib.suppress(SandboxError):
            with contextlib.closing(connect(settings)) as api, boundary(settings.url):
                swept += remove_all(api, token)
            shutil.rmtree(state)
            swept.append(str(state))
    return swept


def remove_all(api: Any, token: str) -> list[str]:
    """Every container and image of one owner, and what they were."""
    label = {"label": f"{OWNER}={token}"}
    containers = [found["Id"] for found in api.containers(all=True, filters=label)]
    for container in containers:
        collect.remove(api, container)
    images = [found["Id"] for found in api.images(all=True, filters=label)]
    for _ in range(2):  # an image goes only after those that are made from it
        for image in images:
            remove_image(api, image)
    return [f"container {name[:12]}" for name in containers] + [f"image {name[7:19]}" for name in images]


def remove_expired(api: Any) -> list[str]:
    """Containers of anyone whose time is over: their owner, wherever it ran, is not coming back for them."""
    removed = []
    for found in api.containers(all=True, filters={"label": EXPIRES}):
        if int(found["Labels"].get(EXPIRES) or 0) < time.time():
            collect.remove(api, found["Id"])
            removed.append(f"container {found['Id'][:12]}")
    return removed


def listed(base: Path) -> list[str]:
    """What `sweep` would look at."""
    return [f"{state} (engine {settings.url})" for _, state, settings in abandoned(base)]
